"""Lines of the log that anybody can make us write: some of each kind, then how many there were.

Whoever is turned away a thousand times a second would else fill the disk, and hide in the crowd
what matters.
"""

from collections import Counter
from collections.abc import Callable, Collection, MutableMapping
from typing import Any, Final

from structlog import DropEvent

WHILE_SECONDS: Final = 10.0
LINES_OF_A_KIND: Final = 100
"""In that time: of one caller, for one reason."""

LINES_TOGETHER: Final = 1000


class Repeats:
    """A processor for structlog: drops what is too much, and says with the next line how much."""

    def __init__(self, monotonic: Callable[[], float], actions: Collection[str]) -> None:
        """`actions` are those of such lines."""
        self._monotonic = monotonic
        self._actions = actions
        self._since = monotonic()
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._withheld = 0

    def __call__(
        self, _logger: object, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if event.get("action") not in self._actions:
            return event
        now = self._monotonic()
        if now - self._since >= WHILE_SECONDS:
            self._since = now
            self._counts.clear()
        kind = tuple(event.get(name) for name in ("action", "caller", "reason"))
        if self._counts[kind] >= LINES_OF_A_KIND or self._counts.total() >= LINES_TOGETHER:
            self._withheld += 1
            raise DropEvent
        self._counts[kind] += 1
        if self._withheld:
            event["withheld"], self._withheld = self._withheld, 0
        return event
