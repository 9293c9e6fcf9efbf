"""Calls to the addresses where processes of the household were announced.

Strangers may announce any number. So many are called at once, and the others wait in line: a call
that leads to no link goes to its end when another waits. Fakes delay a real address by a turn.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

Address: TypeAlias = tuple[str, int]

CALL_LIMIT: Final = 64
WAITING_LIMIT: Final = 1024
REDIAL_SECONDS: Final = 0.5
LONGEST_REDIAL_SECONDS: Final = 8.0
CONNECT_SECONDS: Final = 5.0
HURRY_SECONDS: Final = 0.5
"""For a connection while other addresses wait."""


class Calls:
    """The tasks that call; of one event loop."""

    def __init__(self, call: Callable[[Address, float], Coroutine[Any, Any, bool]]) -> None:
        """`call` gets the seconds for a connection, and returns after the link whether it was."""
        self._call = call
        self._waiting: dict[Address, None] = {}  # in their order
        self.tasks: dict[Address, asyncio.Task[None]] = {}

    def add(self, address: Address) -> None:
        """Call an address, again and again, unless it is called already."""
        if address not in self.tasks:
            self._waiting[address] = None
            self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self.tasks) < CALL_LIMIT:
            address = self._next()
            self.tasks[address] = asyncio.get_running_loop().create_task(self._repeat(address))
        while len(self._waiting) > WAITING_LIMIT:
            self._next()

    def _next(self) -> Address:
        address = next(iter(self._waiting))
        del self._waiting[address]
        return address

    async def _repeat(self, address: Address) -> None:
        pause_seconds = REDIAL_SECONDS
        while True:
            has_linked = await self._call(
                address, HURRY_SECONDS if self._waiting else CONNECT_SECONDS
            )
            # An address without a process costs little after a while.
            pause_seconds = REDIAL_SECONDS if has_linked else pause_seconds * 2
            await asyncio.sleep(min(pause_seconds, LONGEST_REDIAL_SECONDS))
            if self._waiting and not has_linked:
                del self.tasks[address]
                self._waiting[address] = None
                self._begin()
                return
