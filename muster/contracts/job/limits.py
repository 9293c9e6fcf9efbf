"""The limits of the numbers of a job, as its fields declare them."""

from collections.abc import Mapping
from typing import Any, Final, get_args

import msgspec
from msgspec import Meta

from muster.contracts.job.spec import JobSpec


class Range(msgspec.Struct, frozen=True):
    """Inclusive limits of a number."""

    low: float
    high: float


def _limits(hint: Any) -> Range | None:  # noqa: ANN401  an annotation
    for part in get_args(hint):
        found = (
            Range(part.ge, part.le)
            if isinstance(part, Meta) and part.ge is not None and part.le is not None
            else _limits(part)
        )
        if found:
            return found
    return None


LIMITS: Final[Mapping[str, Range]] = {
    name: limits for name, hint in JobSpec.__annotations__.items() if (limits := _limits(hint))
}
"""The limits of every number in a `JobSpec`, by field."""
