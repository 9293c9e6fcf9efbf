"""Calls to the addresses where processes of the household were announced.

Strangers may announce any number. Some are called at once, and the others wait in line. While they
do, a call that leads to no link is given up soon, and its address is forgotten until it is
announced again. So fakes delay a real address by a turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

Address: TypeAlias = tuple[str, int]

CALL_LIMIT: Final = 64
WAITING_LIMIT: Final = 1024
REDIAL_SECONDS: Final = 0.5
LONGEST_REDIAL_SECONDS: Final = 8.0
CONNECT_SECONDS: Final = 5.0

# While other addresses wait
HURRY_SECONDS: Final = 0.5
TURN_SECONDS: Final = 0.1
"""After a call that was refused at once."""


class Calls:
    """The tasks that call; of one event loop."""

    def __init__(self, call: Callable[[Address, float], Coroutine[Any, Any, bool]]) -> None:
        """`call` gets the seconds for a connection, and returns at its end if there was a link."""
        self._call = call
        self._waiting: deque[Address] = deque(maxlen=WAITING_LIMIT)  # the oldest gives way
        self.tasks: dict[Address, asyncio.Task[None]] = {}

    def add(self, address: Address) -> None:
        """Call an address, again and again, unless it is called already."""
        if address not in self.tasks and address not in self._waiting:
            self._waiting.append(address)
            self._begin()

    def _begin(self) -> None:
        while self._waiting and len(self.tasks) < CALL_LIMIT:
            address = self._waiting.popleft()
            again = self._repeat(address)
            self.tasks[address] = asyncio.get_running_loop().create_task(again)

    async def _repeat(self, address: Address) -> None:
        pause_seconds = REDIAL_SECONDS
        while True:
            has_linked = await self._call(
                address, HURRY_SECONDS if self._waiting else CONNECT_SECONDS
            )
            if self._waiting and not has_linked:
                await asyncio.sleep(TURN_SECONDS)
                break
            # An address without a process costs little after a while.
            pause_seconds = REDIAL_SECONDS if has_linked else pause_seconds * 2
            await asyncio.sleep(min(pause_seconds, LONGEST_REDIAL_SECONDS))
        del self.tasks[address]
        self._begin()
