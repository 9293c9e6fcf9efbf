"""What the page says of curves without drawing them, and in what jobs differ. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from api.page.texts import NOTHING
from muster.contracts import leaderboard
from muster.contracts.series import LOSS, THROUGHPUT

EXTREMES: Final = ("first", "least", "greatest", "last", "not_finite")


def in_order(names: Iterable[str]) -> list[str]:
    """Return the loss first, then the throughput, then the metrics by name."""
    return sorted(set(names), key=lambda name: (name != LOSS, name != THROUGHPUT, name))


def differences(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the fields that are not the same in all, as texts, as `muster leaderboard` does."""
    found = leaderboard.differences(specs)
    fields = dict.fromkeys(field for one in found for field in one)
    return {field: [_text(one.get(field)) for one in found] for field in fields}


def _text(value: object) -> str:
    if value is None:
        return NOTHING
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
