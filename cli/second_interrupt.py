"""The second Ctrl-C at `muster up`, told from an echo of the first.

Some senders signal a process and then its whole group, so two signals may be one Ctrl-C. What comes
that soon hurries nobody; but a person may have meant it, and is not left to believe it was heard.
"""

from collections.abc import Callable
from typing import Final

ECHO_SECONDS: Final = 0.5
"""For so long a second signal is the first one's echo: no person has read by then what the second
one would do."""


class SecondInterrupt:
    """Made at the first one; its owner says when the time of echoes is over."""

    def __init__(self, insist: Callable[[], None], say: Callable[[str], None]) -> None:
        self._insist = insist
        self._say = say
        self._is_echo = True
        self._was_heard = False

    def hear(self) -> None:
        """Another one has come."""
        if self._is_echo:
            self._was_heard = True
        else:
            self._insist()

    def end_echo(self) -> None:
        """Whatever comes from now on is meant."""
        self._is_echo = False
        if self._was_heard:
            self._say(
                "a second Ctrl-C so soon may be an echo of the first, and it still waits: "
                "Ctrl-C once more to not wait for them"
            )
