"""The second Ctrl-C at `muster up`, told from the first one and from an echo of it.

Something else may have begun the end: then the first Ctrl-C comes in the midst of it, from somebody
who has yet to read what another one would do. And some senders signal a process and then its whole
group, so two signals may be one Ctrl-C. What comes that soon hurries nobody; but a person may have
meant it, and is not left to believe it was heard.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Final

ECHO_SECONDS: Final = 0.5
"""For so long a second signal is the first one's echo: no person has read by then what the second
one would do."""


class _Next(Enum):
    """What the next Ctrl-C is."""

    FIRST = auto()
    ECHO = auto()
    """Of the first, as far as anybody can tell."""
    MEANT = auto()


class SecondInterrupt:
    """Made when the end begins; if it was a first one that began it, its owner says so."""

    def __init__(
        self,
        insist: Callable[[], None],
        say: Callable[[str], None],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._insist = insist
        self._say = say
        self._later = later
        self._next = _Next.FIRST
        self._had_echo = False

    def hear(self) -> None:
        """One has come while the ranks save."""
        match self._next:
            case _Next.FIRST:
                self.await_echoes()
                self._say("the ranks are saving already … (Ctrl-C again does not wait for them)")
            case _Next.ECHO:
                self._had_echo = True
            case _Next.MEANT:
                self._insist()

    def await_echoes(self) -> None:
        """The first one has come."""
        self._next = _Next.ECHO
        self._later(ECHO_SECONDS, self._end_echo)

    def close(self) -> None:
        """Nobody is left to hurry: say no more."""
        self._had_echo = False

    def _end_echo(self) -> None:
        self._next = _Next.MEANT
        if self._had_echo:
            self._say(
                "a second Ctrl-C so soon may be an echo of the first, and it still waits: "
                "Ctrl-C once more to not wait for them"
            )
