"""Real processes that share memory, real signals."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import arena_rank

LONG_SECONDS = 60.0
SHORT_SECONDS = 0.5


class Host:
    """The agent of four processes; the last is there to replace another."""

    def __init__(self) -> None:
        self._memories = [os.memfd_create("arena") for _ in range(4)]
        self._results: list[int] = []
        self.ranks = [self._start(number) for number in range(4)]
        for rank in self.ranks:
            assert rank.stdout.readline() == "ready\n"

    def announce(
        self,
        members: list[int],
        steps: dict[int, int] | None = None,
        timeout_seconds: float = LONG_SECONDS,
    ) -> None:
        """Tell every member its next group; `steps` says after how many each one rests."""
        self._results.append(os.memfd_create("result"))
        task = {
            "generation": len(self._results),
            "members": members,
            "pids": [self.ranks[number].pid for number in members],
            "result": self._results[-1],
            "timeout_seconds": timeout_seconds,
        }
        for number in members:
            own = task | {"steps": (steps or {}).get(number)}
            print(json.dumps(own), file=self.ranks[number].stdin, flush=True)

    def answer(self, number: int) -> dict[str, Any]:
        return json.loads(self.ranks[number].stdout.readline())

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()
        for descriptor in (*self._memories, *self._results):
            os.close(descriptor)

    def _start(self, number: int) -> subprocess.Popen[str]:
        arguments = [os.getpid(), number, *self._memories]
        return subprocess.Popen(
            [sys.executable, "-P", str(Path(arena_rank.__file__)), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


def total_of(steps: int) -> float:
    return float(sum(step * arena_rank.LEAVES for step in range(steps)))


def done(steps: int) -> dict[str, Any]:
    return {"steps": steps, "error": None, "rank": None, "total": total_of(steps)}


def stopped(steps: int, error: str, rank: int | None) -> dict[str, Any]:
    return {"steps": steps, "error": error, "rank": rank, "total": total_of(steps)}


def test_killed_process_is_noticed_and_replaced(
    host: Host,
) -> None:
    host.announce([0, 1, 2], steps={2: 5})
    assert host.answer(2) == done(5)
    # The others are in the sixth step by now, with a minute to wait for it.
    host.ranks[2].kill()
    for survivor in (0, 1):
        assert host.answer(survivor) == stopped(5, "ChannelClosed", 2)
    host.announce([0, 1, 3], steps=dict.fromkeys((0, 1, 3), 20))
    for member in (0, 1, 3):
        assert host.answer(member) == done(20)


def test_stopped_and_replaced_process_does_no_harm(host: Host) -> None:
    host.announce([0, 1, 2], timeout_seconds=SHORT_SECONDS)
    host.ranks[1].send_signal(signal.SIGSTOP)
    before = [host.answer(survivor) for survivor in (0, 2)]
    assert [answer["error"] for answer in before] == ["TimedOut", "TimedOut"]
    host.announce([0, 2, 3], steps=dict.fromkeys((0, 2, 3), 300))
    host.ranks[1].send_signal(signal.SIGCONT)
    for member in (0, 2, 3):
        assert host.answer(member) == done(300)
    assert host.answer(1)["error"] in {"ChannelClosed", "TimedOut"}
