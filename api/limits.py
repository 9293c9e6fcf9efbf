"""How much one client may ask for: so many requests a second, so many at once.

Each client has a bucket, which a request takes a drop from and which fills again at a steady rate;
a full one is a burst. An open stream is a request that has not ended.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from api.problems import Problem

BURST_SECONDS: Final = 10
"""A page that opens, or a script that begins, asks for much at once."""

CLIENTS_REMEMBERED: Final = 10_000
"""Whoever has addresses without number must not fill the memory with them."""


class TooManyRequests(Problem):
    """Not now; `Retry-After` says when."""

    def __init__(self, slug: str, detail: str, retry_after_seconds: int) -> None:
        super().__init__(
            HTTPStatus.TOO_MANY_REQUESTS,
            slug,
            detail,
            headers={"Retry-After": str(retry_after_seconds)},
        )


@dataclass(slots=True)
class _Bucket:
    drops: float
    at: float


class Limits:
    """The buckets of all clients, and how many of their requests are being answered.

    For one thread: that of the event loop.
    """

    def __init__(self, *, per_second: int, at_once: int, monotonic: Callable[[], float]) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._monotonic = monotonic
        self.buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self.in_flight: Counter[str] = Counter()

    def charge(self, client: str) -> None:
        """Count a request; raises `TooManyRequests`, and then it costs nothing."""
        bucket = self._filled(client)
        if bucket.drops < 1:
            raise TooManyRequests(
                "too-many-requests",
                f"You ask more than {self._per_second} times a second: wait, then go on slower.",
                math.ceil((1 - bucket.drops) / self._per_second),
            )
        bucket.drops -= 1

    @contextmanager
    def admitted(self, client: str | None) -> Iterator[None]:
        """Count a request, as an open one while inside; raises `TooManyRequests`.

        None is the service's own user, for whom no limits hold.
        """
        if client is None:
            yield
            return
        self.charge(client)
        if self.in_flight[client] >= self._at_once:
            raise TooManyRequests(
                "too-many-at-once",
                f"{self._at_once} of your requests are being answered: wait until one has ended, "
                "or close a stream.",
                1,
            )
        self.in_flight[client] += 1
        try:
            yield
        finally:
            self.in_flight[client] -= 1
            if not self.in_flight[client]:
                del self.in_flight[client]

    def _filled(self, client: str) -> _Bucket:
        now = self._monotonic()
        size = float(self._per_second * BURST_SECONDS)
        bucket = self.buckets.setdefault(client, _Bucket(size, now))
        self.buckets.move_to_end(client)
        if len(self.buckets) > CLIENTS_REMEMBERED:
            self.buckets.popitem(last=False)
        bucket.drops = min(size, bucket.drops + (now - bucket.at) * self._per_second)
        bucket.at = now
        return bucket
