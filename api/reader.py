"""Whether a client takes what it is sent: what nobody takes stays in our memory.

A stream would notice by itself. An ordinary answer is handed over whole, and its connection would
wait for ever, closed or not, for a client that reads nothing.
"""

from asyncio import AbstractEventLoop, TimerHandle, Transport
from collections.abc import Callable
from typing import Final

LOOK_SECONDS: Final = 60.0
"""As long as a stream waits for its reader."""

PROGRESS_BYTES: Final = 4096
"""In that time: slower than any line that is still of use."""


class Reader:
    """The other end of a connection, which is to read; `give_up` is called when it does not."""

    def __init__(
        self,
        loop: AbstractEventLoop,
        transport: Transport,
        give_up: Callable[[], None],
        look_seconds: float,
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._give_up = give_up
        self._look_seconds = look_seconds
        self._look: TimerHandle | None = None

    def watch(self) -> None:
        """Look from now on whether the rest of what was written goes away."""
        rest = self._transport.get_write_buffer_size()
        if rest and self._look is None:
            self._look = self._loop.call_later(self._look_seconds, self._judge, rest)

    def trust(self) -> None:
        """Look no longer: it reads, or it is gone."""
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def expect_more(self) -> None:
        """Begin anew with the next answer: of one that was taken whole nothing is to be judged."""
        if not self._transport.get_write_buffer_size():
            self.trust()

    def _judge(self, before: int) -> None:
        self._look = None
        rest = self._transport.get_write_buffer_size()
        if rest and before - rest < PROGRESS_BYTES:
            self._give_up()
        else:
            self.watch()
