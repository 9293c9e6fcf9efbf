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


def scatter_from(backend: Backend, root: int) -> object:
    return do.scatter(backend, parts(backend), zeros(2), root=root)


DIFFERENT_CALLS: Final[dict[str, tuple[Call, Call]]] = {
    "sizes": (lambda it: do.all_reduce(it, zeros(4)), lambda it: do.all_reduce(it, zeros(5))),
    "no elements": (lambda it: do.all_reduce(it, zeros(4)), lambda it: do.all_reduce(it, zeros(0))),
    "ops": (lambda it: do.all_reduce(it, zeros(4)), lambda it: do.all_reduce(it, zeros(4), "max")),
    "data types": (
        lambda it: do.all_reduce(it, zeros(4)),
        lambda it: do.all_reduce(it, zeros(4, dtype="int32")),
    ),
    "routes": (
        lambda it: do.all_reduce(it, zeros(9), route="ring"),
        lambda it: do.all_reduce(it, zeros(9), route="tree"),
    ),
    "operations": (lambda it: do.all_gather(it, zeros(4)), lambda it: do.all_reduce(it, zeros(4))),
    "a barrier": (do.barrier, lambda it: do.all_reduce(it, zeros(4))),
    "only one reduces": (do.barrier, lambda it: do.reduce(it, zeros(4), root=0)),
    "roots": (lambda it: do.broadcast(it, zeros(4)), lambda it: do.broadcast(it, zeros(4), root=1)),
    "roots that wait for each other": (
        lambda it: do.broadcast(it, zeros(4), root=last(it)),
        lambda it: do.broadcast(it, zeros(4), root=0),
    ),
    "roots of scatter": (lambda it: scatter_from(it, last(it)), lambda it: scatter_from(it, 0)),
    "roots of gather": (
        lambda it: do.gather(it, zeros(4)),
        lambda it: do.gather(it, zeros(4), root=1),
    ),
    "directions": (lambda it: do.gather(it, zeros(2)), lambda it: scatter_from(it, 0)),
    "outputs": (
        lambda it: do.all_to_all(it, [zeros(0)] * it.world_size, out=[zeros(0)] * it.world_size),
        lambda it: do.all_to_all(
            it, [zeros(0)] * it.world_size, out=[zeros(n) for n in range(it.world_size)]
        ),
    ),
    "refused arguments": (
        lambda it: do.all_reduce(it, zeros(4)),
        lambda it: do.all_reduce(it, zeros(4, dtype="complex64")),
    ),
    "refused roots": (
        lambda it: do.broadcast(it, zeros(4)),
        lambda it: do.broadcast(it, zeros(4), root=9, async_op=True),
    ),
}


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
def test_an_abort_is_heard_behind_a_message_that_nobody_awaits(name: str) -> None:
    """Rank 0 waits for rank 2 and so does not read on what rank 1 sent of another group."""
    has_given_up, has_heard = threading.Event(), threading.Event()

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
            has_heard.wait()
        elif backend.rank == 0:
            has_heard.set()
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


def big_endian(size: int) -> np.ndarray[Any, Any]:
    return zeros(size, dtype=">f4")


REFUSED: Final[dict[str, tuple[Call, type, str]]] = {
    "objects": (lambda it: do.all_reduce(it, zeros(2, dtype="O")), Unsupported, "use one of"),
    "complex": (lambda it: do.gather(it, zeros(2, dtype="c8")), Unsupported, "<c8 cannot be sent"),
    "big-endian": (lambda it: do.all_gather(it, big_endian(2)), Unsupported, ">f4 cannot be sent"),
    "bfloat16 of float32": (
        lambda it: do.all_reduce(it, zeros(2), dtype="bfloat16"),
        Unsupported,
        "bfloat16 is uint16",
    ),
    "another type": (
        lambda it: do.all_reduce(it, zeros(2), dtype="int32"),
        Unsupported,
        "<f4 cannot be sent as int32",
    ),
    "unknown route": (
        lambda it: do.all_reduce(it, zeros(2), route="moon"),
        Unsupported,
        "no route 'moon': use one of ring",
    ),
    "route of another operation": (
        lambda it: do.broadcast(it, zeros(0), route="whole"),
        Unsupported,
        "broadcast has no route",
    ),
    "unknown op": (lambda it: do.all_reduce(it, zeros(2), "xor"), Unsupported, "use one of sum"),
    "mean of integers": (
        lambda it: do.reduce_scatter(it, zeros(2, dtype="int8"), "mean"),
        Unsupported,
        "the mean of int8 is not int8",
    ),
    "root": (lambda it: do.broadcast(it, zeros(2), root=2), InvalidRank, "no rank 2"),
    "negative root": (lambda it: do.gather(it, zeros(2), root=-1), InvalidRank, "no rank -1"),
    "read-only": (lambda it: do.all_reduce(it, frozen(2)), Unsupported, "read-only"),
    "read-only output": (
        lambda it: do.all_gather(it, zeros(2), out=frozen(2, 2)),
        Unsupported,
        "contiguous, writable array of float32",
    ),
    "small output": (
        lambda it: do.all_gather(it, zeros(2), out=zeros(3)),
        SizeMismatch,
        "16 bytes, got 12",
    ),
    "output of another type": (
        lambda it: do.reduce_scatter(it, zeros(2), out=zeros(1, dtype="f8")),
        Unsupported,
        "array of float32",
    ),
    "output with gaps": (
        lambda it: do.all_to_all(it, [zeros(2)] * 2, out=[zeros(4)[::2]] * 2),
        Unsupported,
        "contiguous",
    ),
    "output for one rank": (
        lambda it: do.all_to_all(it, [zeros(2)] * 2, out=[zeros(2)]),
        Unsupported,
        "1 outputs do not fit 2 ranks",
    ),
    "array for one rank": (
        lambda it: do.all_to_all(it, [zeros(2)]),
        Unsupported,
        "1 arrays do not fit 2 ranks",
    ),
    "arrays of two types": (
        lambda it: do.all_to_all(it, [zeros(2), zeros(2, dtype="i4")]),
        Unsupported,
        "arrays of one data type",
    ),
    "parts that are not equal": (
        lambda it: do.reduce_scatter(it, zeros(3)),
        Unsupported,
        "no 2 equal parts",
    ),
    "nothing to scatter": (
        lambda it: do.scatter(it, None, zeros(2), root=it.rank),
        Unsupported,
        "scatter needs an array of float32",
    ),
    "too little to scatter": (
        lambda it: do.scatter(it, zeros(3), zeros(2), root=it.rank),
        SizeMismatch,
        "16 bytes, got 12",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused(what: str) -> None:
    call, kind, text = REFUSED[what]

    def rank(backend: Backend) -> float:
        with pytest.raises(kind, match=text):
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
    assert {size.expected, size.got} == {16, 20}
    assert isinstance(other, CallMismatch)
    assert {other.expected, other.got} == {
        f"all_reduce {op} of 4 float32 with root 0" for op in ("sum", "max")
    }
