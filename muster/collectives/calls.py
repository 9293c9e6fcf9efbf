"""What one call of a collective says, in 64 bits of every frame: all ranks must say the same."""

from typing import Final, NamedTuple

from muster.collectives.errors import CallMismatch, CollectiveError, SizeMismatch

OPERATIONS: Final = (
    "send",
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)
OPS: Final = ("", "sum", "mean", "min", "max")
DTYPES: Final = (
    "bytes",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)
ROUTES: Final = ("", "ring", "tree", "centralised", "direct", "whole", "two_level")


ITEM_BYTES: Final = dict(zip(DTYPES, (1, 2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True))
_COUNT_BITS: Final = 32


class Call(NamedTuple):
    """One collective call; `code` fits it into a frame."""

    operation: str
    op: str = ""
    dtype: str = "bytes"
    route: str = ""
    root: int = 0
    elements: int = 0
    """Of the whole buffer; 0 where ranks may have different ones."""

    @property
    def size_bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def code(self) -> int:
        """From the lowest: 32 bits of the count, 4 of each name, 16 of the root."""
        code = self.root & 0xFFFF
        for name, names in zip(self[:4], _NAMES, strict=True):
            code = code << 4 | names.index(name)
        return code << _COUNT_BITS | self.elements & ((1 << _COUNT_BITS) - 1)

    def __str__(self) -> str:
        words = [self.operation, self.op, f"of {self.elements} {self.dtype}"]
        words += [f"by route {self.route}"] * bool(self.route)
        return " ".join([*filter(None, words), f"with root {self.root}"])


_NAMES: Final = (OPERATIONS, OPS, DTYPES, ROUTES)


def mismatch(peer: int, expected: int, got: int, *, is_later: bool = False) -> CollectiveError:
    """Return the error for two codes that differ; the one of `peer` may be anything.

    `is_later` if the peer has ended the operation, whatever it was, and `got` is a later one.
    """
    own, other = _call(expected), _call(got)
    if own is None or other is None or is_later or own[:5] != other[:5]:
        name = str(other or f"an unknown operation ({got:#x})")
        return CallMismatch(peer, str(own), "something else before " * is_later + name)
    return SizeMismatch(own.size_bytes, other.size_bytes)


def _call(code: int) -> Call | None:
    indices = [code >> _COUNT_BITS >> shift & 0xF for shift in (12, 8, 4, 0)]
    if any(index >= len(names) for index, names in zip(indices, _NAMES, strict=True)):
        return None
    operation, op, dtype, route = (
        names[index] for index, names in zip(indices, _NAMES, strict=True)
    )
    root, elements = code >> _COUNT_BITS >> 16, code & ((1 << _COUNT_BITS) - 1)
    return Call(operation, op, dtype, route, root, elements)
