"""Whoever is shown something may fail at it: nobody waits for ever, and it is said."""

import asyncio

import pytest

from coordinator.attention import Attention


def test_what_cannot_be_shown_is_said_once_and_the_next_thing_is_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen: list[str] = []

    def fail() -> None:
        raise OSError("too many files are open")

    async def show() -> None:
        attention = Attention()
        for each in (fail, fail, lambda: seen.append("the next thing")):
            attention.begin(each)
            await attention.wait()
        attention.leave()

    asyncio.run(asyncio.wait_for(show(), timeout=60))
    assert seen == ["the next thing"]
    said = "could not be shown (OSError: too many files are open): the job goes on, and its logs"
    assert capfd.readouterr().err.count(said) == 1
