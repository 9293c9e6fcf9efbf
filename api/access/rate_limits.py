"""How many requests one client may send: a token bucket for the rate, a count of those open.

The bucket fills at a steady rate and a full one is a burst. An open stream is an open request.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final

from api.errors import Problem

BURST_SECONDS: Final = 10
"""The size of a bucket: a script that starts sends many requests at once."""

CLIENTS_LIMIT: Final = 10_000
"""How many buckets are kept; the least recently used one goes first."""


class TooManyRequests(Problem):
    """`Retry-After` says when to try again."""

    def __init__(self, slug: str, detail: str, retry_after_seconds: int) -> None:
        headers = {"Retry-After": str(retry_after_seconds)}
        super().__init__(HTTPStatus.TOO_MANY_REQUESTS, slug, detail, headers=headers)


class RateLimiter:
    """The limits of all clients. To be used by the event loop's thread only."""

    def __init__(self, *, per_second: int, at_once: int, monotonic: Callable[[], float]) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._monotonic = monotonic
        self._buckets: dict[str, tuple[float, float]] = {}
        """By client, the least recently used one first: the level, and when it was computed."""
        self._open: Counter[str] = Counter()

    def charge(self, client: str) -> None:
        """Count one request; raise `TooManyRequests` if the bucket is empty."""
        now, size = self._monotonic(), float(self._per_second * BURST_SECONDS)
        level, before = self._buckets.pop(client, (size, now))
        level = min(size, level + (now - before) * self._per_second)
        self._buckets[client] = (level - 1 if level >= 1 else level, now)
        if len(self._buckets) > CLIENTS_LIMIT:
            del self._buckets[next(iter(self._buckets))]
        if level < 1:
            detail = f"You send more than {self._per_second} requests a second. Slow down."
            retry_after_seconds = math.ceil((1 - level) / self._per_second)
            raise TooManyRequests("too-many-requests", detail, retry_after_seconds)

    @contextmanager
    def admit(self, client: str) -> Iterator[None]:
        """Count one request, open while inside; raise `TooManyRequests`."""
        self.charge(client)
        if self._open[client] >= self._at_once:
            detail = f"You have {self._at_once} open requests. Wait for one, or close a stream."
            raise TooManyRequests("too-many-at-once", detail, 1)
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]
