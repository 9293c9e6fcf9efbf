"""A log stream ends when the caller's token is revoked."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from anyio import CapacityLimiter

from api import streams
from api.auth import Unauthorized
from api.dependencies import Reauthenticate
from api.errors import ServiceUnavailable
from api.routes import logs as routes
from api.streams import JobCache, JobState, LogBroadcast
from muster.contracts.paths import DataDir
from tests.unit.api.jobs import JOB

START = b"id: u/0.0:0\nretry: 2000\n\n"


@pytest.fixture
def broadcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogBroadcast:
    """A running job that writes nothing, whose streams wake up at once."""
    monkeypatch.setattr(streams, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(routes, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(streams, "POLL_SECONDS", 0.001)
    cache = JobCache(lambda _id: JobState(JOB, ()), lambda: 0.0)
    return LogBroadcast(
        DataDir(tmp_path), cache, is_closing=lambda: False, readers=CapacityLimiter(1)
    )


def stream(broadcast: LogBroadcast, reauthenticate: Reauthenticate | None) -> list[bytes]:
    async def read() -> list[bytes]:
        state = SimpleNamespace(log_broadcast=broadcast)
        events = routes._events(state, JOB, None, {}, reauthenticate)  # noqa: SLF001
        return [event async for event in events]

    return asyncio.run(asyncio.wait_for(read(), 20))


def test_a_stream_ends_when_its_token_is_revoked(broadcast: LogBroadcast) -> None:
    answers = [None, ServiceUnavailable("away"), None, Unauthorized("revoked-token", "")]

    async def reauthenticate() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    assert stream(broadcast, reauthenticate) == [START], "there is no end event"
    assert answers == [], "an unavailable database does not end it"


def test_a_stream_without_a_revocable_token_goes_on(broadcast: LogBroadcast) -> None:
    async def read() -> None:
        state = SimpleNamespace(log_broadcast=broadcast)
        async for _ in routes._events(state, JOB, None, {}, None):  # noqa: SLF001
            pass

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(read(), 0.2))
