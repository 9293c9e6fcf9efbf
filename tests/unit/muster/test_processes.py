import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from uuid import uuid4

import pytest
from scarcity import no_descriptors

from muster.contracts.environ import MARK
from muster.processes import (
    descendants,
    identify,
    is_provably_gone,
    is_running,
    mark_of,
    marked,
    myself,
    send_signal,
)

NOBODY = 65534
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


@contextmanager
def sleeper(**environ: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, env={**os.environ, **environ})
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def test_a_process_has_one_name_for_ever() -> None:
    with sleeper() as process:
        record = identify(process.pid)
        assert record is not None
        assert record == identify(process.pid)
        assert is_running(record)
        assert not is_provably_gone(record)
        process.kill()
        process.wait()
    assert identify(record.pid) is None
    assert is_provably_gone(record)


def test_who_cannot_look_at_itself_says_why() -> None:
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        myself()


def test_what_is_another_users_is_let_be() -> None:
    program = (
        "import os; from muster.processes import identify, kill\n"
        f"if os.getuid() == 0: os.setuid({NOBODY})\n"
        "assert not kill(identify(1))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_zombie_runs_no_more() -> None:
    with sleeper() as process:
        record = identify(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert identify(process.pid) is None
        assert record is not None
        assert is_provably_gone(record)
        assert not send_signal(record, signal.SIGTERM)


@pytest.mark.parametrize("new", [{"start_ticks": 1}, {"boot_id": "another"}, {"pid": 2**22 + 1}])
def test_a_stranger_with_the_same_pid_is_never_signalled(new: dict[str, object]) -> None:
    stranger = replace(myself(), **new)
    assert not is_running(stranger)
    assert is_provably_gone(stranger)
    assert not send_signal(stranger, signal.SIGKILL)


def test_a_process_of_another_machine_is_not_provably_gone() -> None:
    elsewhere = replace(myself(), node="elsewhere", pid=2**22 + 1)
    assert not is_provably_gone(elsewhere)


def test_exactly_this_process_is_signalled() -> None:
    with sleeper() as process:
        record = identify(process.pid)
        assert record is not None
        assert send_signal(record, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_what_a_rank_starts_carries_its_mark() -> None:
    uid = uuid4().hex
    with sleeper(**{MARK: f"{uid}/3/0"}) as process:
        assert mark_of(process.pid) == f"{uid}/3/0"
        assert [record.pid for record in marked(f"{uid}/")] == [process.pid]
        assert marked(f"{uid}/4") == []
        assert process.pid in descendants(os.getpid())
        assert descendants(process.pid) == []
    assert marked(f"{uid}/") == []


def test_who_is_gone_has_no_mark() -> None:
    assert mark_of(2**22 + 1) is None
