"""Whether the event loop has run all the while.

One that was stopped, or whose machine was, hears nothing and cannot tell: what it finds when it
wakes up looks like the silence of everybody else. A commit may keep the loop's one consumer waiting
for long; that is no sleep, as the loop goes on hearing. So the loop is watched, and not who waits.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

LOOK_SECONDS: Final = 0.5
"""Between looks, if nobody asks for one earlier."""

DROWSY_SECONDS: Final = 1.0
"""A look that is later by more than this was slept over."""


class Wakefulness:
    """Calls `overslept` with the seconds for which the loop stood still, as soon as it goes on."""

    def __init__(self, overslept: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._overslept = overslept
        self._clock = clock
        self._awake_at = 0.0
        self._next: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look again and again while the block runs."""
        self._rest()
        try:
            yield
        finally:
            if self._next is not None:
                self._next.cancel()

    def look(self) -> None:
        """Look now, and not again for a while: who asks often costs no wake-ups."""
        late_seconds = self._clock() - self._awake_at - LOOK_SECONDS
        self._rest()
        if late_seconds > DROWSY_SECONDS:
            self._overslept(late_seconds)

    def _rest(self) -> None:
        self._awake_at = self._clock()
        if self._next is not None:
            self._next.cancel()
        self._next = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)
