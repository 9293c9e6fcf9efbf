"""A loop that was stopped notices; one that comes round is awake."""

import asyncio

import pytest

from coordinator import wakefulness
from coordinator.wakefulness import DROWSY_SECONDS, LOOK_SECONDS, Wakefulness


class Loop:
    """A clock of its own, and what was overslept."""

    def __init__(self) -> None:
        self.now = 0.0
        self.overslept: list[float] = []
        self.noticed = asyncio.Event()
        self.wakefulness = Wakefulness(self.oversleep, lambda: self.now)

    def oversleep(self, seconds: float) -> None:
        self.overslept.append(seconds)
        self.noticed.set()


def test_a_loop_that_stood_still_notices_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakefulness, "LOOK_SECONDS", 0.01)

    async def is_stopped_while_it_waits() -> None:
        loop = Loop()
        with loop.wakefulness.watched():
            loop.now += 60
            await asyncio.wait_for(loop.noticed.wait(), 20)
        assert loop.overslept == [pytest.approx(60, abs=0.1)]

    asyncio.run(is_stopped_while_it_waits())


def test_whoever_looks_first_learns_it_once() -> None:
    async def looks_twice() -> None:
        loop = Loop()
        with loop.wakefulness.watched():
            loop.now += LOOK_SECONDS + DROWSY_SECONDS + 1
            loop.wakefulness.look()
            loop.wakefulness.look()
        assert loop.overslept == [DROWSY_SECONDS + 1]

    asyncio.run(looks_twice())


def test_a_loop_that_always_comes_round_is_awake_for_however_long() -> None:
    async def comes_round() -> None:
        loop = Loop()
        with loop.wakefulness.watched():
            for _ in range(100):
                loop.now += DROWSY_SECONDS / 10
                loop.wakefulness.look()
        assert loop.overslept == []

    asyncio.run(comes_round())
