import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import PROCESS_TAG
from muster.host.containment import tag_of, tagged_processes
from muster.host.processes import (
    PollLimit,
    ProcessorWait,
    counts_waits,
    descendants,
    identify,
    is_provably_gone,
    is_running,
    send_signal,
    this_process,
)
from tests.support.hosts import NAMESPACES, needs_hosts
from tests.support.installation import await_value

NOBODY_UID = 65534
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


@contextmanager
def sleeper(**environ: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, env={**os.environ, **environ})
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def test_identify_returns_the_same_record_until_exit() -> None:
    with sleeper() as process:
        record = identify(process.pid)
        assert record is not None
        assert record == identify(process.pid)
        assert is_running(record)
        assert not is_provably_gone(record)
        assert send_signal(record, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    assert identify(record.pid) is None
    assert is_provably_gone(record)


TWO_THREADS = """
import os, threading
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
def work():
    while True: pass
threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(not counts_waits(), reason="the kernel counts no waits")
def test_a_wait_is_that_of_any_thread_and_not_of_a_stop() -> None:
    with ExitStack() as rivals:
        for _ in range(2):
            command = [sys.executable, "-S", "-c", TWO_THREADS]
            rival = rivals.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            rivals.callback(rival.kill)
            assert rival.stdout is not None
            assert rival.stdout.readline() == b"up\n"
        wait = ProcessorWait(rival.pid)
        await_value(lambda: wait.seconds > 0.1, lambda: f"{wait.seconds}")
        rival.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{rival.pid}/task")
        await_value(
            lambda: all(it.read_text().rpartition(")")[2][1] == "T" for it in tasks.glob("*/stat")),
            lambda: "a thread runs",
        )
        stopped = ProcessorWait(rival.pid)
        os.sched_yield()
        assert stopped.seconds == 0
    assert ProcessorWait(rival.pid).seconds == 0


def test_killing_another_users_process_is_skipped() -> None:
    program = (
        "import os; from muster.host.processes import identify, kill\n"
        f"if os.getuid() == 0: os.setuid({NOBODY_UID})\n"
        "assert not kill(identify(1))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_zombie_is_not_running() -> None:
    with sleeper() as process:
        record = identify(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert identify(process.pid) is None
        assert record is not None
        assert is_provably_gone(record)
        assert not send_signal(record, signal.SIGTERM)


WITHOUT_MAIN_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.PyDLL(None).pthread_exit(None)
"""


def test_a_process_without_its_main_thread_still_runs() -> None:
    with subprocess.Popen([sys.executable, "-c", WITHOUT_MAIN_THREAD]) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        await_value(lambda: ") Z " in stat.read_text(), stat.read_text)
        record = identify(process.pid)
        process.kill()
    assert record is not None


@pytest.mark.parametrize(
    ("new", "is_gone"),
    [
        ({"start_ticks": 1}, True),
        ({"pid": 2**22 + 1}, True),
        ({"pid": 2**22 + 1, "node": "renamed"}, True),
        # Of another machine, which may have our name, or of an earlier boot of this one.
        ({"boot_id": "another"}, False),
        ({"pid": 2**22 + 1, "boot_id": "another"}, False),
        ({"pid": 2**22 + 1, "pid_namespace": 1}, False),
    ],
)
def test_absence_is_proof_in_the_same_boot_and_namespace(
    new: dict[str, object], *, is_gone: bool
) -> None:
    other = replace(this_process(), **new)
    assert not is_running(other)
    assert is_provably_gone(other) == is_gone
    assert not send_signal(other, signal.SIGKILL)


def test_the_number_of_a_thread_is_no_process() -> None:
    with ThreadPoolExecutor(1) as threads:
        number = threads.submit(threading.get_native_id).result()
        assert not send_signal(replace(this_process(), pid=number), signal.SIGKILL)


def test_a_process_whose_host_was_renamed_still_runs() -> None:
    assert is_running(replace(this_process(), node="renamed"))


@needs_hosts(network=False)
def test_another_containers_process_is_not_provably_gone() -> None:
    program = "from muster.host.processes import *; print(this_process(), flush=True); input()"
    words = [*NAMESPACES, sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as container:
        assert container.stdout is not None
        record = eval(container.stdout.readline(), {"ProcessRecord": ProcessRecord})  # noqa: S307
        assert record.node == this_process().node
        assert not is_running(record)
        assert not is_provably_gone(record)
        container.communicate("\n")


def test_tagged_processes_are_found_by_prefix() -> None:
    uid = uuid4().hex
    with sleeper(**{PROCESS_TAG: f"{uid}/3/0"}) as process:
        assert tag_of(process.pid) == f"{uid}/3/0"
        assert [record.pid for record in tagged_processes(f"{uid}/")] == [process.pid]
        assert tagged_processes(f"{uid}/4") == []
        assert process.pid in descendants(os.getpid())
        assert descendants(process.pid) == []
    assert tagged_processes(f"{uid}/") == []
    assert tag_of(2**22 + 1) is None


def test_polling_stops_at_zero_or_when_the_time_is_over() -> None:
    found = iter([3, 1, 0, 7])
    assert PollLimit(seconds=600.0, pause_seconds=0.0).poll(lambda: next(found)) == 0
    assert next(found) == 7
    over = PollLimit(seconds=-1.0, pause_seconds=600.0)
    assert (over.poll(lambda: 2), over.poll(lambda: 0)) == (2, 0)
