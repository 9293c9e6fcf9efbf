"""Kinds by name, and the kind of each array of a model by its size."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Final, TypeAlias

from muster.collectives.compression.half import Half
from muster.collectives.compression.int8 import Int8
from muster.collectives.compression.kind import Float32, Kind
from muster.collectives.compression.power_sgd import PowerSGD
from muster.collectives.compression.random_mask import RandomMask
from muster.collectives.compression.sign import Sign
from muster.collectives.compression.top_k import TopK
from muster.collectives.errors import Unsupported

KINDS: Final[Mapping[str, Callable[..., Kind]]] = {
    "float32": Float32,
    "fp16": partial(Half, "fp16"),
    "bf16": partial(Half, "bf16"),
    "int8": Int8,
    "sign": Sign,
    "top_k": TopK,
    "random": RandomMask,
    "power_sgd": PowerSGD,
}

Compression: TypeAlias = Any
"""A name, such as "int8"; a mapping such as {"kind": "top_k", "ratio": 0.01, "values": "int8"}; or
kinds by the least number of elements: {1024: "int8", 65_536: {"kind": "top_k", "ratio": 0.01}}."""

_LEAST_ELEMENTS: Final = 256
_VECTOR_ELEMENTS: Final = 65_536
"""Biases and norms are shorter: they matter most, and are a small part of the bytes."""


def kind_of(compression: Compression, *, feedback: bool = False) -> Kind:
    """Return a new kind. Raises `Unsupported`, with what is wrong."""
    try:
        options = dict({"kind": compression} if isinstance(compression, str) else compression)
        name = options.pop("kind")
        if "values" in options:
            options["values"] = kind_of(options["values"])
        if name == "random":
            options["is_scaled"] = not feedback
        return KINDS[name](**options)
    except (KeyError, TypeError, ValueError) as error:
        raise Unsupported(
            f"there is no compression {compression!r} ({error}): use {', '.join(KINDS)}, or "
            '{"kind": "top_k", "ratio": 0.01, "values": "int8"}'
        ) from None


def table_of(compression: Compression) -> dict[int, Compression]:
    """Return kinds by the least number of elements of an array, after a look at each."""
    is_table = isinstance(compression, Mapping) and all(isinstance(key, int) for key in compression)
    table = dict(compression) if is_table else {_LEAST_ELEMENTS: compression}
    for given in table.values():
        kind_of(given)
    return dict(sorted(table.items()))


def kind_of_array(
    table: Mapping[int, Compression], shape: Sequence[int], *, feedback: bool
) -> Kind | None:
    """Return a new kind for an array, or None if it stays whole.

    Arrays of few elements stay whole, those of one dimension up to a larger number, and matrices
    that a product of the rank would not make smaller.
    """
    given = [kind for least, kind in table.items() if least <= prod(shape)]
    if not given or (len(shape) <= 1 and prod(shape) < _VECTOR_ELEMENTS):
        return None
    kind = kind_of(given[-1], feedback=feedback)
    return None if isinstance(kind, PowerSGD) and not kind.saves(shape) else kind
