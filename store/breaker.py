"""When the database keeps people waiting in vain, one of them goes on trying; the others are told.

Otherwise a web server's threads, forty of them, would each wait their full time, and whoever comes
then would wait for a thread before the waiting begins.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from store.errors import CommitInDoubt, StoreUnavailable

LONG_SECONDS: Final = 1.0
"""An attempt that failed sooner than this costs nobody much, and may be made by all."""


class Breaker:
    """Lets attempts through, one at a time while the last one has waited long and in vain."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trying = threading.Lock()
        self._trouble: StoreUnavailable | None = None

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Raise the last `StoreUnavailable` again where somebody else is trying if it is back."""
        trouble = self._trouble
        if trouble is None:
            with self._observed():
                yield
            return
        if not self._trying.acquire(blocking=False):
            raise _told_to_others(trouble) from trouble
        try:
            with self._observed():
                yield
        finally:
            self._trying.release()

    @contextmanager
    def _observed(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        except StoreUnavailable as error:
            if self._clock() - began >= LONG_SECONDS:
                self._trouble = error
            raise
        except BaseException:
            self._trouble = None
            raise
        self._trouble = None


def _told_to_others(trouble: StoreUnavailable) -> StoreUnavailable:
    # What was never begun is in no doubt.
    kind = StoreUnavailable if isinstance(trouble, CommitInDoubt) else type(trouble)
    return kind(str(trouble))
