"""Processes that are not our children: a middle process starts them, and reaps them when told."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
from installation import await_value
from scarcity import no_descriptors

from muster.contracts.environ import MARK
from muster.contracts.process import ProcessRecord
from muster.processes import identify, is_running, marked, send_signal
from worker.adopted import Departed, Held, adopted_life
from worker.lives import UNSEEN, ExitStatus

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
    """The parent of the process that is held, which waits at a `read` in its script."""

    def __init__(self, script: str) -> None:
        self.mark = f"{uuid4().hex}/0/0"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", MIDDLE, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: self.mark},
        )
        record = identify(int(self._process.stdout.readline()))
        assert record is not None
        self.record: ProcessRecord = record

    def lets_it_go_on(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def reaps(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "reaped\n"

    def left(self) -> list[ProcessRecord]:
        """Return what the process has left behind."""
        return [record for record in marked(self.mark) if record.pid != self._process.pid]

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


def held(middles: list[Middle], script: str) -> tuple[Middle, Held]:
    middles.append(Middle(script))
    return middles[-1], Held(middles[-1].record)


def await_end(life: Held) -> None:
    await_value(life.has_exited, lambda: "it does not end")


def tells_of_the_reaped() -> bool:
    release = os.uname().release.split("-")[0].split(".")
    return tuple(map(int, release[:2])) >= (6, 15)


def test_a_zombie_says_how_it_ended(middles: list[Middle]) -> None:
    middle, life = held(middles, "read line; exit 7")
    assert not life.has_exited()
    middle.lets_it_go_on()
    await_end(life)
    assert life.ending() == ExitStatus(exit_code=7, signal=None)
    life.let_go()


@pytest.mark.skipif(not tells_of_the_reaped(), reason="only Linux 6.15 and newer tell")
@pytest.mark.parametrize(
    ("last_words", "ending"),
    [
        ("exit 7", ExitStatus(exit_code=7, signal=None)),
        ("kill -TERM $$", ExitStatus(exit_code=None, signal=signal.SIGTERM)),
    ],
)
def test_the_kernel_says_how_a_process_ended_that_somebody_else_has_reaped(
    middles: list[Middle], last_words: str, ending: ExitStatus
) -> None:
    middle, life = held(middles, f"read line; {last_words}")
    middle.lets_it_go_on()
    middle.reaps()
    assert life.has_exited()
    assert life.ending() == ending
    life.let_go()


def test_a_signal_reaches_the_group_even_when_its_leader_is_gone(middles: list[Middle]) -> None:
    middle, life = held(middles, "sleep 600 & read line; exit 0")
    await_value(lambda: len(middle.left()) == 2, lambda: "it has started nothing")
    middle.lets_it_go_on()
    middle.reaps()
    (left,) = middle.left()
    life.signal_group(signal.SIGKILL)
    await_value(lambda: not is_running(left), lambda: "it was not reached")
    life.let_go()
    life.signal_group(signal.SIGKILL)
    assert life.has_exited()


def refused(_pidfd: int, _number: int, _info: None, flags: int) -> None:
    """Be a kernel before 6.9, which knows no flags."""
    assert flags
    raise OSError(errno.EINVAL, "Invalid argument")


def test_an_older_kernel_signals_the_group_by_its_number(middles: list[Middle]) -> None:
    middles.append(Middle("sleep 600 & read line; exit 0"))
    life = Held(middles[-1].record, refused)
    await_value(lambda: len(middles[-1].left()) == 2, lambda: "it has started nothing")
    below = [record for record in middles[-1].left() if record != middles[-1].record]
    life.signal_group(signal.SIGKILL)
    await_end(life)
    await_value(lambda: not any(map(is_running, below)), lambda: "its group was not reached")
    assert life.ending().signal == signal.SIGKILL
    life.let_go()


def test_an_older_kernel_signals_no_group_whose_leader_is_gone(middles: list[Middle]) -> None:
    """The number may be another's by then; whoever contains finds what is left by its brand."""
    middles.append(Middle("sleep 600 & read line; exit 0"))
    life = Held(middles[-1].record, refused)
    await_value(lambda: len(middles[-1].left()) == 2, lambda: "it has started nothing")
    middles[-1].lets_it_go_on()
    middles[-1].reaps()
    (left,) = middles[-1].left()
    life.signal_group(signal.SIGKILL)
    assert is_running(left)
    life.let_go()


def test_only_exactly_the_process_that_is_meant_is_held(middles: list[Middle]) -> None:
    middle, life = held(middles, "exec sleep 600")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
    for other in (
        replace(middle.record, start_ticks=middle.record.start_ticks + 1),
        replace(middle.record, boot_id="another boot"),
        replace(middle.record, pid=1 << 22),
    ):
        with pytest.raises(ProcessLookupError):
            Held(other)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  names are enough
    assert not life.has_exited()
    life.signal_group(signal.SIGKILL)
    await_end(life)
    assert life.ending().signal == signal.SIGKILL
    life.let_go()


@pytest.mark.parametrize("spare", [0, 1])
def test_without_descriptors_nobody_is_taken_for_gone(middles: list[Middle], spare: int) -> None:
    middles.append(Middle("exec sleep 600"))
    living, gone = middles[-1].record, replace(middles[-1].record, pid=1 << 22)
    with no_descriptors(but=spare), pytest.raises(OSError, match="Too many open files"):
        adopted_life(living)
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        adopted_life(gone)
    with no_descriptors(but=2):
        life = adopted_life(living)
        assert isinstance(life, Held)
        life.let_go()


def test_who_was_gone_before_has_ended_unseen() -> None:
    assert Departed(7).has_exited()
    assert Departed(7).ending() == UNSEEN == ExitStatus(exit_code=None, signal=None)
    Departed(os.getpid()).signal_group(signal.SIGKILL)
