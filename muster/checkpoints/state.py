"""What a program may save: numpy arrays at the top level, and values that JSON can say.

numpy is looked at only when the program has brought it in: a state of plain values costs no
import of it.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from muster.checkpoints.errors import UnsupportedState
from muster.checkpoints.values import from_json, to_json

if TYPE_CHECKING:
    from muster.checkpoints.arrays import Array

State: TypeAlias = Mapping[str, Any]
"""Names to arrays (or numpy scalars, which come back as arrays without dimensions) and values."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A state taken apart: the buffers of its arrays' file (empty without arrays), and JSON."""

    buffers: list[memoryview]
    size_bytes: int
    """The length of the arrays' file."""
    values: dict[str, Any]


def pack(state: State) -> Packed:
    """Take a state apart without copying its arrays; raises `UnsupportedState`."""
    arrays, values = split(state)
    buffers = _encode(arrays) if arrays else []
    return Packed(buffers, sum(map(len, buffers)), values)


def unpack(content: bytearray | None, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the state that was packed; raises `CheckpointDamaged`."""
    arrays: Mapping[str, Any] = {}
    if content is not None:
        from muster.checkpoints.arrays import decode  # noqa: PLC0415  see the module's docstring

        arrays = decode(content, where)
    return {**arrays, **{name: from_json(value) for name, value in values.items()}}


def split(state: State) -> "tuple[dict[str, Array], dict[str, Any]]":
    """Return the arrays, and the JSON form of everything else; raises `UnsupportedState`."""
    if not isinstance(state, Mapping):
        raise UnsupportedState(
            f"a state of type {type(state).__name__} cannot be saved: use a dictionary of names"
        )
    numpy = sys.modules.get("numpy")
    arrays = {}
    values = {}
    for name, value in state.items():
        if not isinstance(name, str):
            raise UnsupportedState(f"the state has the key {name!r}: use a string")
        # Exactly an array: a subclass (masked, matrix) would lose what makes it one.
        if numpy and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
            arrays[name] = numpy.asarray(value)
        else:
            values[name] = to_json(value, f'state["{name}"]')
    return arrays, values


def _encode(arrays: "Mapping[str, Array]") -> list[memoryview]:
    from muster.checkpoints.arrays import encode  # noqa: PLC0415  see the module's docstring

    return encode(arrays)
