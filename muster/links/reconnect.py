"""How often to try again to reach the other end, and what to say meanwhile."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Final

from muster.contracts.errors import AuthenticationFailed, WireError

LINK_ERRORS: Final = (OSError, WireError, AuthenticationFailed)
"""After which a connection is closed, and another one made."""


@dataclass
class Reconnect:
    """Attempts to reach the other end, with a pause between two. Iterated over, it numbers them."""

    pause_seconds: float
    limit_seconds: float = math.inf  # from the beginning, or the last `restart`
    say: Callable[[str], None] | None = None
    error: Exception | None = None  # of the last attempt that has failed

    def __iter__(self) -> Iterator[int]:
        self.restart()
        for number in count():
            yield number
            if time.monotonic() >= self._over_at:
                break
            time.sleep(self.pause_seconds)

    def restart(self) -> None:
        """Begin to count anew: the other end was reached."""
        self._over_at = time.monotonic() + self.limit_seconds

    def failed(self, error: Exception, prefix: str = "") -> None:
        """Say why an attempt has failed, unless the last one has failed for the same reason."""
        if self.say is not None and str(error) != str(self.error):
            self.say(f"{prefix}{error}")
        self.error = error
