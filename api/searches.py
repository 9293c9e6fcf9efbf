"""Searches in logs: each keeps a thread busy for a second, so there are few of them at once.

They have threads of their own, or forty of them would hold up every route. And few of one client's
are searched at a time: whoever asks for a hundred waits for themselves, and not others for them.
"""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

AT_ONCE: Final = 4
AT_ONCE_OF_ONE: Final = 2

Found = TypeVar("Found")


class Searches:
    """Whoever searches. For one event loop."""

    def __init__(self) -> None:
        self._threads = CapacityLimiter(AT_ONCE)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By client, for as long as they have something to wait for."""

    async def run(self, client: str, search: Callable[[], Found]) -> Found:
        """Return what `search` finds, when it is its turn."""
        turn = self._turns.setdefault(client, asyncio.Semaphore(AT_ONCE_OF_ONE))
        async with turn:
            return await run_sync(search, limiter=self._threads)
