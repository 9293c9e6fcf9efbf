"""What the page says of curves without drawing them, and in what jobs differ. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from api.page.texts import NOTHING
from muster.contracts.series import LOSS, THROUGHPUT

EXTREMES: Final = ("first", "least", "greatest", "last", "not_finite")


def in_order(names: Iterable[str]) -> list[str]:
    """Return the loss first, then the throughput, then the metrics by name."""
    return sorted(set(names), key=lambda it: (it != LOSS, it != THROUGHPUT, it))


def differences(specs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the fields that are not the same in all, as texts; of `env` each variable is one."""
    flat: list[dict[str, object]] = []
    for spec in specs:
        env = {f"env.{name}": value for name, value in (spec.get("env") or {}).items()}
        flat.append({**spec, "env": None, **env})
    fields = dict.fromkeys(field for spec in flat for field in spec)
    rows = {field: [_text(spec.get(field)) for spec in flat] for field in fields}
    return {field: texts for field, texts in rows.items() if len(set(texts)) > 1}


def _text(value: object) -> str:
    if value is None:
        return NOTHING
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
