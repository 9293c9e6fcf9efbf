"""Arrays in the safetensors layout: readable by everybody, executable by nobody.

An 8-byte little-endian length, a JSON header, then the arrays' bytes one after another. Names are
sorted and there is no metadata block, so equal states are equal files. Encoding copies nothing
that is contiguous; decoding gives writable views of the bytes it was handed.
"""

import struct
from collections.abc import Mapping
from math import prod
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from muster.checkpoints.errors import CheckpointDamaged, UnsupportedState

Array: TypeAlias = NDArray[Any]

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
"""numpy's name of each type we write, and safetensors'."""

METADATA: Final = "__metadata__"
"""A name that the format keeps for itself."""

ALIGNMENT_BYTES: Final = 8
_LENGTH: Final = struct.Struct("<Q")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_NUMPY_DTYPES: Final = {theirs: np.dtype(ours) for ours, theirs in DTYPES.items()}
_HEADER: Final = msgspec.json.Decoder(dict[str, _Entry])


def encode(arrays: Mapping[str, Array]) -> list[memoryview]:
    """Return the file as a list of buffers: the header, then each array's own memory.

    The arrays must not change until the buffers are written. Raises `UnsupportedState`.
    """
    entries: dict[str, _Entry] = {}
    buffers = []
    end = 0
    for name in sorted(arrays):
        array = arrays[name]
        start, end = end, end + array.nbytes
        entries[name] = _Entry(_dtype(name, array), array.shape, (start, end))
        buffers.append(_memory(array))
    return [memoryview(_header(entries)), *buffers]


def decode(content: bytearray, where: str) -> dict[str, Array]:
    """Return the arrays of a file as views of `content`; raises `CheckpointDamaged`.

    Every shape and offset is held against the bytes that are there, which must all be named
    exactly once, before an array is made of them.
    """
    entries, data_start = _entries(content, where)
    arrays = {}
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype = _NUMPY_DTYPES.get(entry.dtype)
        start, end = entry.data_offsets
        if (
            dtype is None
            or min(entry.shape, default=0) < 0
            or start != expected
            or end - start != prod(entry.shape) * dtype.itemsize
            or end > len(content) - data_start
        ):
            raise CheckpointDamaged(f"{where} describes the array {name!r} wrongly")
        flat = np.frombuffer(content, dtype, prod(entry.shape), data_start + start)
        # One byte of bools before it, and an array of floats lies askew: that one is copied.
        arrays[name] = np.require(flat, requirements="A").reshape(entry.shape)
        expected = end
    if data_start + expected != len(content):
        raise CheckpointDamaged(f"{where} has bytes that belong to no array")
    return arrays


def _dtype(name: str, array: Array) -> str:
    if name == METADATA:
        raise UnsupportedState(f"no array can be called {METADATA!r}: use another name")
    try:
        return DTYPES[array.dtype.str]
    except KeyError:
        raise UnsupportedState(
            f"the array {name!r} has the dtype {array.dtype}, which a checkpoint cannot hold: "
            "convert it to a little-endian bool, int or float of 16 to 64 bits"
        ) from None


def _memory(array: Array) -> memoryview:
    return np.asarray(array, order="C").reshape(-1).view(np.uint8).data


def _header(entries: Mapping[str, _Entry]) -> bytes:
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % ALIGNMENT_BYTES)
    return _LENGTH.pack(len(header)) + header


def _entries(content: bytearray, where: str) -> tuple[dict[str, _Entry], int]:
    if len(content) < _LENGTH.size:
        raise CheckpointDamaged(f"{where} is cut short")
    (length,) = _LENGTH.unpack_from(content)
    data_start = _LENGTH.size + length
    if data_start > len(content):
        raise CheckpointDamaged(f"{where} is cut short, or is no safetensors file")
    try:
        return _HEADER.decode(memoryview(content)[_LENGTH.size : data_start]), data_start
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(f"{where} has a header that cannot be read: {error}") from error
