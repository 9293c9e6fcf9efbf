"""Whom an agent hears, and how much of each at once: no rank keeps the others waiting.

What is beyond a rank's share waits in its socket until the next tick.
"""

import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from muster.contracts.messages import RankSaid
from worker.child import Child

LAST_WORDS_LIMIT: Final = 1 << 16
"""More packets than a socket holds: nobody is there to send more, and none is left unread."""


class Hearing:
    """Listens to ranks over their channels, in the caller's selector."""

    def __init__(
        self, selector: selectors.BaseSelector, report: Callable[[RankSaid], None]
    ) -> None:
        self._selector = selector
        self._report = report
        self._present: set[Child] = set()
        self._hushed: set[Child] = set()
        """Who has had its share, and is heard again at the next tick."""

    def admit(self, child: Child) -> None:
        """Hear it from now on, if it has a channel."""
        self._present.add(child)
        self._listen(child)

    def reconnect(self, child: Child, channel: socket.socket) -> None:
        """Go on with another channel, once what was said on the one before has been heard."""
        child.grant()
        self._hear(child)
        self._ignore(child)
        if child.channel is not None:
            child.channel.close()
        child.channel = channel
        self._listen(child)

    def dismiss(self, child: Child) -> None:
        """Hear its last words, and no more."""
        child.grant(LAST_WORDS_LIMIT)
        self._hear(child)
        self._ignore(child)
        self._present.discard(child)

    def listen_again(self) -> None:
        """Give everybody the next share; to be called once in a tick."""
        for child in self._present:
            child.grant()
        while self._hushed:
            self._listen(self._hushed.pop())

    def _hear(self, child: Child) -> None:
        if child not in self._present:
            return  # it ended in the same turn of the loop
        heard, is_open = child.listen()
        for message in heard:
            self._report(RankSaid(rank=child.rank, incarnation=child.incarnation, message=message))
        if not is_open:
            self._ignore(child)
        elif child.has_had_its_share:
            self._ignore(child)
            self._hushed.add(child)

    def _listen(self, child: Child) -> None:
        if child.channel is not None:
            self._selector.register(child.channel, selectors.EVENT_READ, lambda: self._hear(child))

    def _ignore(self, child: Child) -> None:
        """A closed channel would be readable for ever; closing it is a program's right."""
        self._hushed.discard(child)
        if child.channel is not None:
            # Not registered, or closed already: its word and its end may come at the same moment.
            with suppress(KeyError, ValueError):
                self._selector.unregister(child.channel)
