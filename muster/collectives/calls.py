"""What one call of a collective says, in 64 bits of every frame: all ranks must say the same."""

from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from muster.collectives.errors import CallMismatch, CollectiveError, SizeMismatch
from muster.collectives.routes import ROUTES

Op: TypeAlias = Literal["sum", "mean", "min", "max", "product", "band", "bor", "bxor"]
OPS: Final[tuple[str, ...]] = get_args(Op)

ITEM_BYTES: Final = {
    "bytes": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    **{f"{kind}{8 * size}": size for kind in ("int", "uint") for size in (1, 2, 4, 8)},
}
"""Data type → size of an element; "bytes" stands for a call without arrays."""

DTYPES: Final = tuple(ITEM_BYTES)[1:]

_NAMES: Final = (
    ("send", *ROUTES, "all_to_all", "barrier"),
    ("", *OPS),
    tuple(ITEM_BYTES),
    ("", *dict.fromkeys(name for routes in ROUTES.values() for name in routes)),
)
"""Of the first four fields of a call. The position of a name, four bits, is what is sent."""

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
        # Of a larger count only the low bits: the lengths of messages tell such calls apart.
        return code << _COUNT_BITS | self.elements & ((1 << _COUNT_BITS) - 1)

    def __str__(self) -> str:
        words = [self.operation, self.op, f"of {self.elements} {self.dtype}"]
        words += [f"by route {self.route}"] * bool(self.route)
        return " ".join([*filter(None, words), f"with root {self.root}"])


def mismatch(peer: int, expected: int, got: int, *, is_later: bool = False) -> CollectiveError:
    """Return the error for two codes that differ; the one of `peer` may be anything.

    `is_later` if the peer has ended the operation, whatever it was, and `got` is a later one.
    """
    own, other = _call(expected), _call(got)
    if own is None or other is None or is_later or own[:5] != other[:5]:
        name = str(other or f"an unknown operation ({got:#x})")
        return CallMismatch(peer, str(own), "something else before " * is_later + name)
    return SizeMismatch(own.size_bytes, other.size_bytes, peer)


def _call(code: int) -> Call | None:
    numbers = code >> _COUNT_BITS
    shifts = (12, 8, 4, 0)
    try:
        names = [of[numbers >> shift & 0xF] for shift, of in zip(shifts, _NAMES, strict=True)]
    except IndexError:
        return None
    operation, op, dtype, route = names
    return Call(operation, op, dtype, route, numbers >> 16, code & ((1 << _COUNT_BITS) - 1))
