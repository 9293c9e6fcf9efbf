"""Checks a call of a collective, and plans it: everything that does not depend on the data."""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from muster.collectives.backend import Backend
from muster.collectives.calls import DTYPES, OPS, Call
from muster.collectives.engine import (
    Array,
    Combine,
    Schedule,
    in_float32,
    narrow,
    schedule_of,
    widen,
)
from muster.collectives.errors import InvalidRank, SizeMismatch, Unsupported
from muster.collectives.routes import Problem, choose, route_of
from muster.contracts.shards import ranges


class Plan(NamedTuple):
    """All that follows from a call and the position of this rank."""

    call: Call
    code: int
    combine: Combine
    schedule: Schedule
    is_empty: bool

    def finish(self, array: Array, world_size: int) -> None:
        """Divide the sum, if the mean is wanted."""
        if self.call.op != "mean":
            return
        if self.call.dtype == "bfloat16":
            narrow(widen(array) / np.float32(world_size), array)
        else:
            np.divide(array, array.dtype.type(world_size), out=array)


_COMBINES: Final = {
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
"""Of all others `numpy.add`: a mean is divided at the end."""

BARRIER: Final = Plan(Call("barrier"), Call("barrier").code, np.add, (), is_empty=False)


def plan_of(backend: Backend, array: Array, wanted: Call) -> Plan:
    """Check what a caller wants to do with arrays of this data type, and plan it.

    In `wanted` the data type may be empty, for that of the array, and the route "auto".
    """
    return _planned(wanted, array.dtype, backend.rank, backend.world_size, backend.hosts)


@lru_cache(maxsize=512)
def _planned(
    wanted: Call, given: np.dtype[Any], rank: int, world_size: int, hosts: tuple[int, ...]
) -> Plan:
    """A program repeats few calls, and a plan takes longer than a small message."""
    operation, op, dtype, route, root, elements = wanted
    name = dtype or given.name
    is_bfloat16 = name == "bfloat16" and given == np.uint16
    if name not in DTYPES or not given.isnative or not (is_bfloat16 or name == given.name):
        raise Unsupported(
            f"arrays of {given.str} cannot be sent as {name}: use one of "
            f"{', '.join(DTYPES)}; bfloat16 is uint16 with dtype='bfloat16'"
        )
    if op not in ("", *OPS):
        raise Unsupported(f"{operation} has no op {op!r}: use one of {', '.join(OPS)}")
    if op == "mean" and "float" not in name:
        raise Unsupported(f"the mean of {name} is not {name}: use the sum and divide it")
    if op in {"band", "bor", "bxor"} and "float" in name:
        raise Unsupported(f"{op} combines bits, which {name} has no use for: use integers")
    if not 0 <= root < world_size:
        raise InvalidRank(root, world_size)
    # Auto is sent as "", not as the route that is chosen: ranks compare what they asked for.
    call = Call(operation, op, name, "" if route == "auto" else route, root, elements)
    schedule: Schedule = ()
    if operation != "all_to_all":
        bounds = (0, *(stop for _, stop in ranges(elements, world_size)))
        problem = Problem(world_size=world_size, bounds=bounds, root=root, hosts=hosts)
        chosen = call.route or choose(operation, call.size_bytes, problem)
        schedule = schedule_of(route_of(operation, chosen, rank, problem), rank, given.itemsize)
    ufunc = _COMBINES.get(op, np.add)
    combine = in_float32(ufunc) if is_bfloat16 else ufunc
    is_empty = elements == 0 and operation != "all_to_all"
    return Plan(call, call.code, combine, schedule, is_empty)


def flat_of(array: Array) -> Array:
    """Return all elements as one contiguous array: the memory of `array` itself if it can be."""
    if not isinstance(array, np.ndarray):
        raise Unsupported(
            f"a {type(array).__name__} is not an array of numpy: pass numpy.asarray(…), or "
            "tensor.numpy()"
        )
    return np.ascontiguousarray(array).reshape(-1)


def writable(array: Array) -> Array:
    """Return the same of an array that the operation writes to."""
    flat = flat_of(array)
    if not array.flags.writeable:
        raise Unsupported("the array is read-only, and the result is put there: pass a copy")
    return flat


def put_back(flat: Array, array: Array) -> Array:
    """Write what was computed in a contiguous copy back to where it came from."""
    if not array.flags.c_contiguous:
        array[...] = flat.reshape(array.shape)
    return array


def check_out(out: Array, size: int, like: Array) -> None:
    if out.dtype != like.dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise Unsupported(
            f"the output has to be a contiguous, writable array of {like.dtype}: use numpy.empty"
        )
    if out.size != size:
        raise SizeMismatch(size * like.itemsize, out.nbytes)
