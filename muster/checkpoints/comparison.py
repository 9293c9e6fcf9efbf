"""What differs between two states. Pure: dictionaries in, values out.

Bits are compared, not numbers: 0.0 and -0.0 differ, and a NaN equals the same NaN. How much arrays
differ is then said in numbers, for people.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from muster.checkpoints.arrays import Array
from muster.checkpoints.state import State
from muster.checkpoints.values import to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One entry of two states that is not the same in both."""

    name: str
    first: str | None
    """What it is in the first state; None: it is not there."""
    second: str | None
    elements: int | None = None
    """How many elements differ, where both are arrays of the same shape and type."""
    largest: float | None = None
    """The largest absolute difference of two elements; None too where one is no finite number."""


def differences(first: State, second: State) -> list[Difference]:
    """Return what differs, by name; nothing where both have the same bits."""
    return list(_differences(first, second))


def _differences(first: State, second: State) -> Iterator[Difference]:
    for name in sorted({*first, *second}):
        if name not in first or name not in second:
            yield Difference(
                name=name, first=_described(first, name), second=_described(second, name)
            )
            continue
        one, other = first[name], second[name]
        if _are_alike(one, other):
            if elements := int(np.count_nonzero(_bits(one) != _bits(other))):
                yield Difference(
                    name=name,
                    first=describe(one),
                    second=describe(other),
                    elements=elements,
                    largest=_largest(one, other),
                )
        elif _written(one) != _written(other):
            yield Difference(name=name, first=describe(one), second=describe(other))


def describe(value: Any) -> str:  # noqa: ANN401  whatever a state holds
    """Return an array's type and shape, or any other value as it is written."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {shape(value.shape)}"
    return repr(value)


def shape(dimensions: Iterable[int]) -> str:
    """Return ``64x10``; an array without dimensions is a ``scalar``."""
    return "x".join(map(str, dimensions)) or "scalar"


def _described(state: State, name: str) -> str | None:
    return describe(state[name]) if name in state else None


def _written(value: object) -> bytes:
    """Return what tells a value from others: 1, 1.0 and True are three."""
    if isinstance(value, np.ndarray):
        return describe(value).encode()
    return msgspec.json.encode(to_json(value, "value"), order="sorted")


def _are_alike(one: object, other: object) -> bool:
    return (
        isinstance(one, np.ndarray)
        and isinstance(other, np.ndarray)
        and (one.dtype, one.shape) == (other.dtype, other.shape)
    )


def _bits(array: Array) -> Array:
    return np.asarray(array, order="C").reshape(-1).view(f"u{array.itemsize}")


def _largest(one: Array, other: Array) -> float | None:
    with np.errstate(over="ignore", invalid="ignore"):
        apart = np.abs(one.astype(np.float64) - other.astype(np.float64))
    largest = float(np.max(apart))
    return largest if np.isfinite(largest) else None
