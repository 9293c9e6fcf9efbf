"""A state as bytes: numpy arrays in the safetensors layout, every other value as JSON.

safetensors: an 8-byte little-endian length, a JSON header, then the arrays' bytes. Names are
sorted and there is no metadata block, so equal states give equal files (the safetensors library
orders by dtype first). Encoding copies no contiguous array; decoding returns writable views.

JSON: None, bools, ints of any size, finite floats, strings, lists and dicts with string keys are
themselves. What JSON does not have is an object with one reserved key: ``{"__float__": "inf"}``,
``{"__tuple__": [...]}``, ``{"__items__": [[0, ...]]}`` for a dict with integer keys and
``{"__counter__": [[30, 1]]}`` for a `Counter`. Any other value is refused.

numpy is only imported for states with arrays, which saves a program without it the import.
"""

import math
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from muster.checkpoints.errors import CheckpointDamaged, UnsupportedState

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"

State: TypeAlias = Mapping[str, Any]
"""Names to arrays (or numpy scalars, which come back as arrays without dimensions) and values."""

DTYPES: Final[Mapping[str, str]] = {
    "|b1": "BOOL",
    "|i1": "I8",
    "|u1": "U8",
    "<i2": "I16",
    "<u2": "U16",
    "<f2": "F16",
    "<i4": "I32",
    "<u4": "U32",
    "<f4": "F32",
    "<i8": "I64",
    "<u8": "U64",
    "<f8": "F64",
}
"""The supported types: numpy's name (kind and size in bytes), and that of safetensors."""

FOREIGN: Final[Mapping[str, str]] = {"bfloat16": "BF16", "complex64": "C64"}
"""Types of torch that safetensors has, and our checkpoints have not."""

METADATA: Final = "__metadata__"  # a name that safetensors reserves

FLOAT: Final = "__float__"
TUPLE: Final = "__tuple__"
ITEMS: Final = "__items__"
COUNTER: Final = "__counter__"
_RESERVED: Final = frozenset({FLOAT, TUPLE, ITEMS, COUNTER})

ALIGNMENT_BYTES: Final = 8
_LENGTH: Final = struct.Struct("<Q")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_NUMPY_NAMES: Final = {theirs: ours for ours, theirs in DTYPES.items()}
_HEADER: Final = msgspec.json.Decoder(dict[str, _Entry])


@dataclass(frozen=True, slots=True)
class Packed:
    """A state as the buffers of its arrays' file (empty without arrays), and JSON values."""

    buffers: Iterable[memoryview]
    size_bytes: int  # the length of the arrays' file
    values: dict[str, Any]


def pack(state: State) -> Packed:
    """Encode a state without copying its arrays; raises `UnsupportedState`."""
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
            values[name] = to_json(value, f"state[{name!r}]")
    buffers = encode_arrays(arrays) if arrays else []
    return Packed(buffers, sum(map(len, buffers)), values)


def unpack(content: bytearray | None, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the state that was packed; raises `CheckpointDamaged`."""
    arrays = {} if content is None else decode_arrays(content, where)
    return {**arrays, **{name: from_json(value) for name, value in values.items()}}


def encode_arrays(
    arrays: "Mapping[str, Array]", foreign: Mapping[str, str] = MappingProxyType({})
) -> list[memoryview]:
    """Return the file as a list of buffers: the header, then each array's own memory.

    `foreign` has the types of `FOREIGN` of the arrays that hold the bits of such numbers; a file
    with them is for other programs, `decode_arrays` refuses it. The arrays must not change until
    the buffers are written. Raises `UnsupportedState`.
    """
    import numpy as np  # noqa: PLC0415  see the module's docstring

    entries: dict[str, _Entry] = {}
    buffers = []
    end = 0
    for name in sorted(arrays):
        array = arrays[name]
        start, end = end, end + array.nbytes
        dtype = FOREIGN[foreign[name]] if name in foreign else _dtype(name, array)
        entries[name] = _Entry(dtype, array.shape, (start, end))
        buffers.append(np.asarray(array, order="C").reshape(-1).view(np.uint8).data)
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % ALIGNMENT_BYTES)
    return [memoryview(_LENGTH.pack(len(header)) + header), *buffers]


def decode_arrays(content: bytearray, where: str) -> "dict[str, Array]":
    """Return the arrays of a file as views of `content`; raises `CheckpointDamaged`.

    Every shape and offset is checked before an array is made: the entries must cover the data
    exactly once.
    """
    import numpy as np  # noqa: PLC0415  see the module's docstring

    entries, data_start = _entries(content, where)
    arrays = {}
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype = _NUMPY_NAMES.get(entry.dtype)
        start, end = entry.data_offsets
        if (
            dtype is None
            or min(entry.shape, default=0) < 0
            or start != expected
            or end - start != prod(entry.shape) * int(dtype[2:])
            or end > len(content) - data_start
        ):
            raise CheckpointDamaged(f"{where} describes the array {name!r} incorrectly")
        flat = np.frombuffer(content, dtype, prod(entry.shape), data_start + start)
        # An odd number of bools before it leaves an array of floats unaligned: that one is copied.
        arrays[name] = np.require(flat, requirements="A").reshape(entry.shape)
        expected = end
    if data_start + expected != len(content):
        raise CheckpointDamaged(f"{where} has bytes that belong to no array")
    return arrays


def to_json(value: object, where: str) -> Any:  # noqa: ANN401  JSON is anything
    """Return the JSON form of `value`; raises `UnsupportedState` naming the place `where`."""
    try:
        return _to_json(value, where)
    except RecursionError as error:
        raise UnsupportedState(f"{where} is nested too deeply, or contains itself") from error


def from_json(value: Any) -> Any:  # noqa: ANN401  JSON is anything
    """Return the value whose JSON form this is."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {FLOAT}:
            return float(value[FLOAT])
        if value.keys() == {TUPLE}:
            return tuple(from_json(item) for item in value[TUPLE])
        if value.keys() == {ITEMS}:
            return {key: from_json(item) for key, item in value[ITEMS]}
        if value.keys() == {COUNTER}:
            return Counter(dict(value[COUNTER]))
        return {key: from_json(item) for key, item in value.items()}
    return value


def _dtype(name: str, array: "Array") -> str:
    if name == METADATA:
        raise UnsupportedState(f"an array cannot be called {METADATA!r}: use another name")
    try:
        return DTYPES[array.dtype.str]
    except KeyError:
        raise UnsupportedState(
            f"the array {name!r} has the dtype {array.dtype}, which a checkpoint cannot hold: "
            "convert it to a little-endian bool, int or float of 16 to 64 bits"
        ) from None


def _entries(content: bytearray, where: str) -> tuple[dict[str, _Entry], int]:
    """Return the header's entries, and where the data starts."""
    if len(content) < _LENGTH.size:
        raise CheckpointDamaged(f"{where} is truncated")
    (length,) = _LENGTH.unpack_from(content)
    data_start = _LENGTH.size + length
    if data_start > len(content):
        raise CheckpointDamaged(f"{where} is truncated, or not a safetensors file")
    try:
        return _HEADER.decode(memoryview(content)[_LENGTH.size : data_start]), data_start
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(f"{where} has an invalid header: {error}") from error


def _to_json(value: object, where: str) -> Any:  # noqa: ANN401  JSON is anything
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT: repr(float(value))}
    if isinstance(value, list):
        return [_to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {TUPLE: _to_json(list(value), where)}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int) or key in _RESERVED:
                raise UnsupportedState(
                    f"{where} has the key {key!r}: use strings and integers as keys, and not "
                    f"{', '.join(sorted(_RESERVED))}"
                )
        items = {key: _to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
        if isinstance(value, Counter):
            return {COUNTER: list(items.items())}
        is_object = all(isinstance(key, str) for key in items)
        return items if is_object else {ITEMS: list(items.items())}
    raise UnsupportedState(
        f"{where} is of the type {type(value).__name__}, which a checkpoint cannot hold: use "
        "tensors, numpy arrays, None, bool, int, float, str, and lists, tuples and dicts of these"
    )
