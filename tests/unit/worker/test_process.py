"""Processes that are not our children: a middle process starts and reaps them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest

from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import PROCESS_TAG
from muster.host.containment import tagged_processes
from muster.host.processes import identify, is_running, send_signal
from tests.support.installation import await_value
from worker.ranks.process import UNKNOWN_EXIT, AdoptedProcess, ExitStatus

MIDDLE = """
import subprocess, sys
child = subprocess.Popen(
    ["sh", "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
    start_new_session=True,
)
print(child.pid, flush=True)
sys.stdin.readline()
child.stdin.close()
sys.stdin.readline()
child.wait()
print("reaped", flush=True)
"""


class Middle:
    """The parent of the adopted process, which waits at a `read` in its script."""

    def __init__(self, script: str) -> None:
        self.tag = f"{uuid4().hex}/0/0"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", MIDDLE, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, PROCESS_TAG: self.tag},
        )
        record = identify(int(self._process.stdout.readline()))
        assert record is not None
        self.record: ProcessRecord = record

    def continues(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def reaps(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "reaped\n"

    def left(self) -> list[ProcessRecord]:
        """Return what the process has left behind."""
        return [record for record in tagged_processes(self.tag) if record.pid != self._process.pid]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        for record in self.left():
            send_signal(record, signal.SIGKILL)


@pytest.fixture
def middles() -> Iterator[list[Middle]]:
    middles: list[Middle] = []
    yield middles
    for middle in middles:
        middle.close()


def adopted(middles: list[Middle], script: str) -> tuple[Middle, AdoptedProcess]:
    middles.append(Middle(script))
    return middles[-1], AdoptedProcess(middles[-1].record)


def await_exit(process: AdoptedProcess) -> None:
    await_value(process.has_exited, lambda: "it does not exit")


def has_pidfd_info() -> bool:
    release = os.uname().release.split("-")[0].split(".")
    return tuple(map(int, release[:2])) >= (6, 15)


def test_the_exit_status_of_a_zombie_is_known(middles: list[Middle]) -> None:
    middle, process = adopted(middles, "read line; exit 7")
    assert not process.has_exited()
    middle.continues()
    await_exit(process)
    assert process.exit_status() == ExitStatus(exit_code=7, signal=None)
    process.release()


@pytest.mark.skipif(not has_pidfd_info(), reason="needs Linux 6.15")
@pytest.mark.parametrize(
    ("last_command", "status"),
    [
        ("exit 7", ExitStatus(exit_code=7, signal=None)),
        ("kill -TERM $$", ExitStatus(exit_code=None, signal=signal.SIGTERM)),
    ],
)
def test_the_exit_status_of_a_reaped_process_is_known(
    middles: list[Middle], last_command: str, status: ExitStatus
) -> None:
    middle, process = adopted(middles, f"read line; {last_command}")
    middle.continues()
    middle.reaps()
    assert process.has_exited()
    assert process.exit_status() == status
    process.release()


def test_a_signal_reaches_the_group_while_its_leader_lives(middles: list[Middle]) -> None:
    """Containment finds what a leader has left by its tag."""
    middle, process = adopted(middles, "sleep 600 & read line; exit 0")
    left = await_value(
        lambda: found if len(found := middle.left()) == 2 else [],
        lambda: "it has not started its child",
    )
    (below,) = (record for record in left if record != middle.record)
    process.signal_group(signal.SIGKILL)
    await_exit(process)
    await_value(lambda: not is_running(below), lambda: "its group was not signalled")
    assert process.exit_status().signal == signal.SIGKILL
    process.release()
    process.signal_group(signal.SIGKILL)
    assert process.has_exited()


def test_a_reused_group_id_is_not_signalled(middles: list[Middle]) -> None:
    middle, process = adopted(middles, "sleep 600 & read line; exit 0")
    await_value(lambda: len(middle.left()) == 2, lambda: "it has not started its child")
    middle.continues()
    middle.reaps()
    (left,) = await_value(middle.left, lambda: "its child is gone")  # unseen while it execs
    process.signal_group(signal.SIGKILL)
    assert is_running(left)
    process.release()


@pytest.mark.parametrize("new", [{"start_ticks": 1}, {"boot_id": "another boot"}, {"pid": 1 << 22}])
def test_a_process_that_has_the_pid_now_is_not_adopted(new: dict[str, object]) -> None:
    with subprocess.Popen(["/bin/sleep", "600"], start_new_session=True) as other:
        record = identify(other.pid)
        assert record is not None
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
        gone = AdoptedProcess(replace(record, **new))
        gone.signal_group(signal.SIGKILL)
        assert (gone.has_exited(), gone.exit_status(), gone.identity) == (True, UNKNOWN_EXIT, None)
        gone.release()
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  names are enough
        assert other.poll() is None
        other.kill()
