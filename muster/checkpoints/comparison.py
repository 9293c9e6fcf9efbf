"""The differences between two states, and the sha256 that identifies one.

Bits are compared, not numbers: 0.0 and -0.0 differ, and a NaN equals the same NaN.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from muster.checkpoints.format import Array, State, pack, to_json
from muster.checkpoints.listing import CheckpointDir
from muster.checkpoints.manifest import VIRTUAL_SHARDS
from muster.checkpoints.reader import Checkpoint
from muster.contracts.shards import Position


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One entry that is not the same in both states."""

    name: str
    first: str | None  # its description in the first state; None if it is missing there
    second: str | None
    elements: int | None = None
    """How many elements differ, if both are arrays of the same shape and type."""
    largest: float | None = None
    """The largest absolute difference of two elements; None if it is not finite."""


def differences(first: State, second: State) -> list[Difference]:
    """Return the entries that differ, by name; empty if both have the same bits."""
    return list(_differences(first, second))


def identity(state: State, position: Position) -> str:
    """Return the sha256 of a state, equal if and only if two runs computed the same.

    It covers arrays (name, dtype, shape, bytes), values and the position, but not when, where or by
    which attempt they were saved, so that an interrupted run can be compared with another. Raises
    `UnsupportedState`.
    """
    packed = pack({name: value for name, value in state.items() if name != VIRTUAL_SHARDS})
    digest = sha256(msgspec.json.encode([packed.values, position], order="sorted"))
    for buffer in packed.buffers:
        digest.update(buffer)
    return digest.hexdigest()


def identity_of(checkpoint: Checkpoint) -> str:
    """Return the identity of a restored checkpoint."""
    return identity(checkpoint.state, checkpoint.position)


def digests(places: Iterable[CheckpointDir]) -> Iterator[tuple[str, int, str]]:
    """Yield (whose, step, sha256) of the newest checkpoint of each place.

    Raises a `CheckpointError` if there is none, or if it is damaged.
    """
    for place in places:
        newest = place.newest()
        yield place.label, newest.step, identity_of(newest)


def _differences(first: State, second: State) -> Iterator[Difference]:
    for name in sorted({*first, *second}):
        if name not in first or name not in second:
            yield Difference(
                name=name, first=_described(first, name), second=_described(second, name)
            )
            continue
        left, right = first[name], second[name]
        if _are_alike(left, right):
            if elements := int(np.count_nonzero(_bits(left) != _bits(right))):
                yield Difference(
                    name=name,
                    first=_describe(left),
                    second=_describe(right),
                    elements=elements,
                    largest=_largest(left, right),
                )
        elif _written(left) != _written(right):
            yield Difference(name=name, first=_describe(left), second=_describe(right))


def _describe(value: Any) -> str:  # noqa: ANN401  whatever a state holds
    """Return an array's type and shape, such as ``float32 64x10``, or the repr of a value."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {'x'.join(map(str, value.shape)) or 'scalar'}"
    return repr(value)


def _described(state: State, name: str) -> str | None:
    return _describe(state[name]) if name in state else None


def _written(value: object) -> bytes:
    """Return bytes that are equal for equal values: 1, 1.0 and True are different."""
    if isinstance(value, np.ndarray):
        return _describe(value).encode()
    return msgspec.json.encode(to_json(value, "value"), order="sorted")


def _are_alike(left: object, right: object) -> bool:
    return (
        isinstance(left, np.ndarray)
        and isinstance(right, np.ndarray)
        and (left.dtype, left.shape) == (right.dtype, right.shape)
    )


def _bits(array: Array) -> Array:
    return np.asarray(array, order="C").reshape(-1).view(f"u{array.itemsize}")


def _largest(left: Array, right: Array) -> float | None:
    with np.errstate(over="ignore", invalid="ignore"):
        apart = np.abs(left.astype(np.float64) - right.astype(np.float64))
    largest = float(np.max(apart))
    return largest if np.isfinite(largest) else None
