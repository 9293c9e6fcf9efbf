"""What ranks do wrong: each gets an error that says it, and the next collective is right."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from muster.collectives import operations as do
from muster.collectives.backend import Backend
from muster.collectives.errors import (
    Aborted,
    CallMismatch,
    ChannelClosed,
    CollectiveError,
    InvalidRank,
    InvalidWorldSize,
    SizeMismatch,
    Timeout,
    Unsupported,
)
from muster.collectives.simulated import SimulatedBackend, run_ranks
from muster.collectives.subgroups import SubBackend
from muster.collectives.transports.shared_memory import SharedMemoryBackend
from muster.collectives.transports.tcp import TcpBackend
from tests.support.groups import BACKENDS, LIMIT_BYTES, TRANSPORTS

Call = Callable[[Backend], object]

SOON: Final = 0.05


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def parts(backend: Backend) -> np.ndarray[Any, Any]:
    return zeros(backend.world_size, 2)


def last(backend: Backend) -> int:
    return backend.world_size - 1


def sums(size: int, op: str = "sum", dtype: str = "float32", **options: object) -> Call:
    return lambda it: do.all_reduce(it, zeros(size, dtype=dtype), op, **options)


def broadcasts(root: int) -> Call:
    return lambda it: do.broadcast(it, zeros(4), root=root % it.world_size)


def gathers(root: int) -> Call:
    return lambda it: do.gather(it, zeros(2), root=root)


def scatters(root: int) -> Call:
    return lambda it: do.scatter(it, parts(it), zeros(2), root=root % it.world_size)


def sends_nothing(it: Backend) -> object:
    return do.all_to_all(it, [zeros(0)] * it.world_size, out=[zeros(0)] * it.world_size)


def expects_much(it: Backend) -> object:
    return do.all_to_all(it, [zeros(0)] * it.world_size, out=[*map(zeros, range(it.world_size))])


DIFFERENT_CALLS: Final[dict[str, tuple[Call, Call]]] = {
    "sizes": (sums(4), sums(5)),
    "no elements": (sums(4), sums(0)),
    "ops": (sums(4), sums(4, "max")),
    "data types": (sums(4), sums(4, dtype="int32")),
    "routes": (sums(9, route="ring"), sums(9, route="tree")),
    "operations": (lambda it: do.all_gather(it, zeros(4)), sums(4)),
    "a barrier": (do.barrier, sums(4)),
    "only one reduces": (do.barrier, lambda it: do.reduce(it, zeros(4), root=0)),
    "roots": (broadcasts(0), broadcasts(1)),
    "roots that wait for each other": (broadcasts(-1), broadcasts(0)),
    "roots of scatter": (scatters(-1), scatters(0)),
    "roots of gather": (gathers(0), gathers(1)),
    "directions": (gathers(0), scatters(0)),
    "outputs": (sends_nothing, expects_much),
    "refused arguments": (sums(4), sums(4, dtype="complex64")),
    "refused in the background": (sums(4), sums(4, route="moon", async_op=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("calls", DIFFERENT_CALLS)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_different_calls_fail_at_once(name: str, calls: str, world_size: int) -> None:
    """The last rank does something else. Some ranks may have done their part before they can know.

    Those that wait end long before their timeout.
    """
    most, odd = DIFFERENT_CALLS[calls]
    errors: list[CollectiveError] = []

    def rank(backend: Backend) -> float:
        try:
            (odd if backend.rank == last(backend) else most)(backend)
        except CollectiveError as error:
            errors.append(error)
        return float(do.all_reduce(backend, np.full(3, 2.0**backend.rank))[0])

    with TRANSPORTS[name](world_size) as group:
        assert run_ranks(group.backends, rank) == [2.0**world_size - 1] * world_size
    named = [error for error in errors if not isinstance(error, Aborted)]
    assert named or (calls, world_size) == ("roots", 2)  # where both only send
    assert {type(error) for error in named} <= {
        CallMismatch,
        SizeMismatch,
        Unsupported,
        InvalidRank,
    }


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_rank_that_comes_late_can_go_on(name: str, world_size: int) -> None:
    """The others end with a timeout, or because one of them has."""
    have_ended = threading.Barrier(world_size)

    def rank(backend: Backend) -> tuple[type | None, float]:
        error: type | None = None
        if backend.rank == last(backend):
            have_ended.wait()
        try:
            do.all_reduce(backend, zeros(50_000), route="ring", timeout_seconds=SOON)
        except CollectiveError as caught:
            error = type(caught)
        if backend.rank != last(backend):
            have_ended.wait()
        do.barrier(backend)
        return error, float(do.all_reduce(backend, np.full(3, 2.0**backend.rank))[0])

    with BACKENDS[name](world_size) as group:
        ends = run_ranks(group.backends, rank)
    assert {total for _, total in ends} == {2.0**world_size - 1}
    kinds = [kind for kind, _ in ends]
    assert Timeout in kinds[:-1]
    assert set(kinds) <= {Timeout, Aborted}


@pytest.mark.parametrize("name", ["tcp", "shared_memory"])
def test_an_abort_is_found_behind_an_unexpected_message(name: str) -> None:
    """Rank 0 waits for rank 2 and so does not read on what rank 1 sent of another group."""
    has_given_up, has_received = threading.Event(), threading.Event()

    def rank(backend: Backend) -> type | None:
        other = SubBackend(backend, range(3))
        error: type | None = None
        if backend.rank == 1:
            early = do.all_reduce(other, zeros(60_000), async_op=True, route="whole")
        if backend.rank == 2:
            has_given_up.wait()
        try:
            seconds = SOON if backend.rank == 1 else 20.0
            do.broadcast(backend, zeros(9), root=2, route="ring", timeout_seconds=seconds)
        except CollectiveError as caught:
            error = type(caught)
        if backend.rank == 1:
            has_given_up.set()
            has_received.wait()
        elif backend.rank == 0:
            has_received.set()
        if backend.rank == 1:
            early.wait()
        else:
            do.all_reduce(other, zeros(60_000), route="whole")
        return error

    with TRANSPORTS[name](3) as group:
        assert run_ranks(group.backends, rank) == [Aborted, Timeout, Aborted]


def frozen(*shape: int) -> np.ndarray[Any, Any]:
    array = zeros(*shape)
    array.flags.writeable = False
    return array


def exchanges(arrays: list[Any], out: list[Any] | None = None) -> Call:
    return lambda it: do.all_to_all(it, arrays, out=out)


REFUSED: Final[dict[str, tuple[Call, type]]] = {
    "objects": (sums(2, dtype="O"), Unsupported),
    "complex": (sums(2, dtype="c8"), Unsupported),
    "big-endian": (sums(2, dtype=">f4"), Unsupported),
    "bfloat16 of float32": (lambda it: do.gather(it, zeros(2), dtype="bfloat16"), Unsupported),
    "another type": (lambda it: do.all_gather(it, zeros(2), dtype="int32"), Unsupported),
    "unknown route": (sums(2, route="moon"), Unsupported),
    "route of another operation": (
        lambda it: do.broadcast(it, zeros(0), route="whole"),
        Unsupported,
    ),
    "unknown op": (sums(2, "xor"), Unsupported),
    "mean of integers": (sums(2, "mean", dtype="int8"), Unsupported),
    "root": (lambda it: do.broadcast(it, zeros(2), root=2), InvalidRank),
    "negative root": (lambda it: do.gather(it, zeros(2), root=-1), InvalidRank),
    "read-only": (lambda it: do.all_reduce(it, frozen(2)), Unsupported),
    "read-only output": (lambda it: do.all_gather(it, zeros(2), out=frozen(2, 2)), Unsupported),
    "small output": (lambda it: do.all_gather(it, zeros(2), out=zeros(3)), SizeMismatch),
    "output of another type": (
        lambda it: do.reduce_scatter(it, zeros(2), out=zeros(1, dtype="f8")),
        Unsupported,
    ),
    "output with gaps": (exchanges([zeros(2)] * 2, [zeros(4)[::2]] * 2), Unsupported),
    "output for one rank": (exchanges([zeros(2)] * 2, [zeros(2)]), Unsupported),
    "array for one rank": (exchanges([zeros(2)]), Unsupported),
    "arrays of two types": (exchanges([zeros(2), zeros(2, dtype="i4")]), Unsupported),
    "unequal parts": (lambda it: do.reduce_scatter(it, zeros(3)), Unsupported),
    "nothing to scatter": (
        lambda it: do.scatter(it, None, zeros(2), root=it.rank),
        Unsupported,
    ),
    "too little to scatter": (
        lambda it: do.scatter(it, zeros(3), zeros(2), root=it.rank),
        SizeMismatch,
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused(what: str) -> None:
    call, kind = REFUSED[what]

    def rank(backend: Backend) -> float:
        with pytest.raises(kind, match=": "):
            call(backend)
        return float(do.all_reduce(backend, np.full(3, 2.0**backend.rank))[0])

    assert run_ranks(SimulatedBackend.create_group(2), rank) == [3.0, 3.0]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_a_message_above_the_limit_ends_the_operation(name: str) -> None:
    def rank(backend: Backend) -> tuple[type, float]:
        with pytest.raises((Unsupported, Aborted), match="send it in parts") as caught:
            do.broadcast(backend, zeros(LIMIT_BYTES // 4 + 1), route="direct")
        return caught.type, float(do.all_reduce(backend, np.ones(3))[0])

    with TRANSPORTS[name](3) as group:
        assert run_ranks(group.backends, rank) == [(Unsupported, 3.0), *[(Aborted, 3.0)] * 2]


@pytest.mark.parametrize("name", [*TRANSPORTS, "hybrid"])
def test_operations_of_a_closed_backend_raise(name: str) -> None:
    with BACKENDS[name](2) as group:
        backend = group.backends[0]
        backend.close()
        for call in (do.barrier, lambda it: do.all_reduce(it, zeros(2))):
            with pytest.raises(ChannelClosed, match="rank 0 is closed"):
                call(backend)
        with pytest.raises(ChannelClosed, match="rank 0 is closed"):
            do.all_reduce(backend, zeros(2), async_op=True).wait()


def test_a_world_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidWorldSize) as refused:
        SimulatedBackend.create_group(0)
    assert refused.value.world_size == 0
    for world_size in (0, -1):
        with pytest.raises(InvalidWorldSize, match="at least 1"):
            SharedMemoryBackend.connect(tmp_path / "meeting", 0, world_size)
    for world_size in (0, 1):
        with pytest.raises(InvalidWorldSize, match="at least 2"):
            TcpBackend.connect("127.0.0.1:1", 0, world_size)


def test_fields_of_errors_say_what_was_called() -> None:
    def first(calls: str) -> CollectiveError:
        def rank(backend: Backend) -> CollectiveError:
            with pytest.raises((SizeMismatch, CallMismatch, Aborted)) as caught:
                DIFFERENT_CALLS[calls][backend.rank](backend)
            return caught.value

        errors = run_ranks(SimulatedBackend.create_group(2), rank)
        return next(error for error in errors if not isinstance(error, Aborted))

    size, other = first("sizes"), first("ops")
    assert isinstance(size, SizeMismatch)
    assert {(size.expected, size.got, size.rank)} <= {(16, 20, 1), (20, 16, 0)}
    assert isinstance(other, CallMismatch)
    assert {other.expected, other.got} == {
        f"all_reduce {op} of 4 float32 with root 0" for op in ("sum", "max")
    }


@pytest.mark.parametrize("operation", [do.all_reduce, do.broadcast])
def test_argument_that_is_no_array_is_named(operation: Callable[..., object]) -> None:
    (backend,) = SimulatedBackend.create_group(1)
    with pytest.raises(Unsupported, match="a list is not an array of numpy"):
        operation(backend, [1.0, 2.0])
