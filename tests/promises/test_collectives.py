"""The promises of the collective operations, on every backend, compared with numpy."""

import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, product
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from muster.collectives import operations
from muster.collectives.backend import Backend
from muster.collectives.calls import DTYPES, OPS
from muster.collectives.errors import ChannelClosed, Timeout
from muster.collectives.operation_queue import Outcome, counters
from muster.collectives.operations import all_reduce
from muster.collectives.routes import ROUTES
from muster.collectives.simulated import SimulatedBackend, run_ranks
from muster.collectives.subgroups import SubBackend
from tests.support.groups import BACKENDS, TRANSPORTS
from tests.support.marks import long

pytestmark = pytest.mark.slow

Array = NDArray[Any]

SHAPES: Final = [(17,), (3, 5), (), (0,), (1,), (1500,)]
"""The last one is larger than a ring of the tests."""
LAYOUTS: Final = ["plain", "strided", "reversed", "transposed"]
IN_RANK_ORDER: Final = ["whole", "direct", "centralised"]
"""Routes of an all-reduce that combine all operands of an element at once, in order of rank."""
QUIET_NANS: Final = {
    "float16": 0x7E00,
    "bfloat16": 0x7FC0,
    "float32": 0x7FC0 << 16,
    "float64": 0x7FF8 << 48,
}
RANKS: Final = 5
FREED_SECONDS: Final = 10.0


class Case(NamedTuple):
    """One call, the same on all ranks apart from its data."""

    operation: str
    route: str = "auto"
    op: str = ""
    dtype: str = "float32"
    shape: tuple[int, ...] = (17,)
    layout: str = "plain"
    root: int = 0
    has_out: bool = False
    is_async: bool = False
    seed: int = 0

    def values(self, rank: int, *shape: int, to: int = 0) -> Array:
        """Return small integers, whose sums every data type holds, as that type."""
        low = 0 if self.dtype.startswith("uint") else -6
        numbers = np.arange(math.prod(shape)).reshape(shape)
        numbers = (5 * numbers + numbers // 13 + 7 * rank + 3 * to + self.seed) % 13 + low
        return np.asarray(stored(numbers, self.dtype))


def stored(values: Array, dtype: str) -> Array:
    if dtype != "bfloat16":
        return values.astype(dtype)
    return to_bfloat16(values.astype(np.float32))


def to_bfloat16(values: Array) -> Array:
    """Return the nearest of the two bfloat16 around each finite value, the even one of a tie."""
    values = np.asarray(values)
    low = values.view(np.uint32) & np.uint32(0xFFFF0000)  # NumPy 1 makes an int64 of an int
    high = low + np.uint32(0x10000)
    below, above = (
        np.abs(it.view(np.float32).astype(float) - values.astype(float)) for it in (low, high)
    )
    is_high = (above < below) | ((above == below) & (low >> 16 & 1 == 1))
    return np.asarray(np.where(is_high, high, low) >> 16).astype(np.uint16)


def from_bfloat16(array: Array) -> Array:
    return np.asarray(array.astype(np.uint32) << np.uint32(16)).view(np.float32)


BITWISE = {"band", "bor", "bxor"}
JOINS = {
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def combined(case: Case, arrays: list[Array]) -> Array:
    """Return what numpy makes of the arrays, one after the other."""
    is_brain = case.dtype == "bfloat16"
    join = JOINS.get(case.op, np.add)
    wide = [from_bfloat16(array) if is_brain else array for array in arrays]
    total = wide[0]
    for other in wide[1:]:
        total = join(total, other)
        if is_brain:
            total = from_bfloat16(to_bfloat16(total))
    if case.op == "mean":
        total = total / total.dtype.type(len(arrays))
    return np.asarray(to_bfloat16(total) if is_brain else total)


def laid_out(array: Array, layout: str) -> Array:
    """Return a writable copy of the array whose memory is laid out in some way."""
    if layout == "plain" or array.ndim == 0:
        return array.copy()
    memory = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    view = memory[..., ::2]
    if layout == "reversed":
        view = memory[..., : array.shape[-1]][..., ::-1]
    if layout == "transposed":
        view = np.zeros(array.shape[::-1], array.dtype).T
    view[...] = array
    return view


def cases(world_size: int) -> Iterator[Case]:
    """Yield every route with every op and data type in turn; the rest rotates with the number."""
    dtypes, numbers = DTYPES, count(world_size)
    for operation, routes in [*ROUTES.items(), ("all_to_all", ["auto"]), ("barrier", ["auto"])]:
        ops = OPS if "reduce" in operation else ("",)
        wanted = {("auto", op, dtype) for op, dtype in product(ops, dtypes)}
        wanted |= {(route, op, "float32") for route, op in product(routes, ops)}
        for (route, op, dtype), number in zip(sorted(wanted), numbers, strict=False):
            if "float" not in dtype if op == "mean" else "float" in dtype and op in BITWISE:
                continue
            if world_size > 3 and route == "auto" and number % 4:
                continue  # how elements are combined does not depend on the world size
            yield Case(
                operation,
                route,
                op,
                dtype,
                SHAPES[number % len(SHAPES)],
                LAYOUTS[number // 2 % len(LAYOUTS)],
                number % world_size
                if operation in {"reduce", "broadcast", "gather", "scatter"}
                else 0,
                has_out=number % 3 == 0,
                is_async=number % 5 < 2,
                seed=number,
            )


def play(backend: Backend, case: Case, arguments: list[Any], **options: object) -> Outcome:
    """Call the operation, and wait for its result."""
    function: Callable[..., Any] = getattr(operations, case.operation)
    if case.operation not in {"all_to_all", "barrier"}:
        options |= {"route": case.route}
    if case.dtype == "bfloat16" and case.operation != "barrier":
        options |= {"dtype": case.dtype}
    if case.op:
        options |= {"op": case.op}
    if case.operation in {"reduce", "broadcast", "gather", "scatter"}:
        options |= {"root": case.root}
    result = function(backend, *arguments, async_op=case.is_async, **options)
    return result.wait() if case.is_async else result


def part_sizes(case: Case, rank: int, world_size: int) -> list[int]:
    """Return how many elements `rank` sends to each rank in an all-to-all; some are none."""
    return [(3 * rank + 5 * peer + case.seed) % 7 for peer in range(world_size)]


def arguments_of(case: Case, rank: int, world_size: int) -> list[Any]:
    """Return what a rank passes."""
    lay = lambda array: laid_out(array, case.layout)  # noqa: E731  clear as it is
    match case.operation:
        case "barrier":
            return []
        case "all_to_all":
            sizes = part_sizes(case, rank, world_size)
            return [[lay(case.values(rank, size, to=peer)) for peer, size in enumerate(sizes)]]
        case "scatter":
            is_root = rank == case.root
            whole = lay(case.values(rank, world_size, *case.shape)) if is_root else None
            return [whole, lay(np.zeros_like(case.values(rank, *case.shape)))]
        case "reduce_scatter":
            return [lay(case.values(rank, world_size, *case.shape))]
        case _:
            return [lay(case.values(rank, *case.shape))]


def expected_of(  # noqa: PLR0911  one for each operation
    case: Case, rank: int, world_size: int
) -> Outcome:
    """Return what the call returns on a rank."""
    everyone, is_root = range(world_size), rank == case.root
    one = [case.values(each, *case.shape) for each in everyone]
    whole = [case.values(each, world_size, *case.shape) for each in everyone]
    match case.operation:
        case "all_reduce":
            return combined(case, one)
        case "reduce":
            return combined(case, one) if is_root else one[rank]
        case "broadcast":
            return one[case.root]
        case "gather":
            return np.stack(one) if is_root else None
        case "all_gather":
            return np.stack(one)
        case "scatter":
            return whole[case.root][rank]
        case "reduce_scatter":
            return combined(case, whole)[rank]
        case "all_to_all":
            sizes = [part_sizes(case, each, world_size)[rank] for each in everyone]
            return [case.values(each, size, to=rank) for each, size in enumerate(sizes)]
    return None


def fault_of(backend: Backend, case: Case) -> str:
    """Play a case on one rank; say what is wrong with the result."""
    rank, world_size = backend.rank, backend.world_size
    arguments = arguments_of(case, rank, world_size)
    before, expected = bits(arguments), expected_of(case, rank, world_size)
    options: dict[str, Any] = {}
    if case.has_out and case.operation in {"all_gather", "reduce_scatter"}:
        options["out"] = np.empty_like(expected)
    if case.has_out and case.operation == "all_to_all":
        options["out"] = [np.empty_like(part) for part in expected]
    result = play(backend, case, arguments, **options)
    if bits([result]) != bits([expected]):
        return f"rank {rank} of {case}: {result} instead of {expected}"
    if case.operation in {"all_reduce", "reduce", "broadcast"}:
        options["out"] = arguments[0]
    elif case.operation == "scatter":
        options["out"] = arguments[1]
        before, arguments = before[:1], arguments[:1]
    if result is not options.get("out", result) and result != options["out"]:
        return f"rank {rank} of {case}: not in place"
    if case.operation not in {"all_reduce", "reduce", "broadcast"} and bits(arguments) != before:
        return f"rank {rank} of {case}: changed its input"
    return ""


def bits(value: Outcome) -> object:
    """Return shapes, data types and bytes of arrays in lists."""
    if isinstance(value, list):
        return [bits(each) for each in value]
    return None if value is None else (value.shape, value.dtype.name, value.tobytes())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, *map(long, [6, 7, 8, 9])])
@pytest.mark.parametrize("name", BACKENDS)
def test_results_are_those_of_numpy(name: str, world_size: int) -> None:
    def rank(backend: Backend) -> list[str]:
        return [fault for case in cases(world_size) if (fault := fault_of(backend, case))]

    with BACKENDS[name](world_size) as group:
        assert run_ranks(group.backends, rank) == [[]] * world_size


def difficult(case: Case, rank: int) -> Array:
    """Return numbers of all magnitudes, infinities, -0, and NaN with a payload of each rank."""
    draw = np.random.default_rng([case.seed, rank])
    numbers = draw.standard_normal(case.shape) * 10.0 ** draw.integers(-9, 9, case.shape)
    special = draw.choice([np.inf, -np.inf, -0.0, 1e-45, 65504.0], case.shape)
    kinds = draw.random(case.shape)
    with np.errstate(all="ignore"):
        array = stored(np.where(kinds < 0.02, special, numbers), case.dtype)
    raw = array.view(f"uint{8 * array.itemsize}")
    raw[kinds > 0.99] = QUIET_NANS[case.dtype] + rank + 1
    return array


def with_equal_nans(array: Array, dtype: str) -> bytes:
    wide = from_bfloat16(array) if dtype == "bfloat16" else array
    return np.where(np.isnan(wide), 0, array).tobytes() + np.isnan(wide).tobytes()


@pytest.mark.parametrize("name", BACKENDS)
def test_all_ranks_get_the_same_bits(name: str) -> None:
    ops = [op for op in OPS if op not in BITWISE]
    kinds = product(ROUTES["all_reduce"], ops, QUIET_NANS)
    trials = [
        Case("all_reduce", route, op, dtype, (1500,), is_async=seed % 2 > 0, seed=seed)
        for seed, (route, op, dtype) in enumerate(kinds)
    ]

    def rank(backend: Backend) -> list[Array]:
        return [play(backend, it, [difficult(it, backend.rank)]) for it in trials]

    with BACKENDS[name](RANKS) as group:
        for case, *results in zip(trials, *run_ranks(group.backends, rank), strict=True):
            assert len({result.tobytes() for result in results}) == 1, case
            if case.route in IN_RANK_ORDER and case.op in {"sum", "mean"}:
                with np.errstate(all="ignore"):
                    right = combined(case, [difficult(case, each) for each in range(RANKS)])
                given = with_equal_nans(results[0], case.dtype)
                assert given == with_equal_nans(right, case.dtype), case


@given(st.data())
@settings(max_examples=60)
def test_any_calls_one_after_the_other(data: st.DataObject) -> None:
    """Sizes, routes and roots at random, some of the calls in the background."""
    world_size = data.draw(st.integers(1, 5))
    kinds = [(operation, route) for operation in ROUTES for route in ROUTES[operation]]
    one = st.builds(
        lambda kind, **options: Case(*kind, op="sum" if "reduce" in kind[0] else "", **options),
        st.sampled_from([*kinds, ("all_to_all", "auto"), ("barrier", "auto")]),
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        layout=st.sampled_from(LAYOUTS),
        root=st.integers(0, world_size - 1),
        has_out=st.booleans(),
        is_async=st.booleans(),
        seed=st.integers(0, 12),
    )
    trials = data.draw(st.lists(one, max_size=6))

    def rank(backend: Backend) -> list[str]:
        return [fault for case in trials if (fault := fault_of(backend, case))]

    group = SimulatedBackend.create_group(world_size)
    assert run_ranks(group, rank) == [[]] * world_size


@pytest.mark.parametrize("name", BACKENDS)
def test_a_fork_takes_no_part_in_its_parents_group(name: str) -> None:
    with BACKENDS[name](2) as group:
        first, second = group.backends
        if (pid := os.fork()) == 0:
            with suppress(ChannelClosed):
                first.send(1, b"child", timeout_seconds=1.0)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        first.send(1, b"owner")
        assert second.recv(0, 5) == b"owner"


@pytest.mark.parametrize("name", BACKENDS)
def test_traffic_is_counted_as_its_callers_see_it(name: str) -> None:
    def rank(backend: Backend) -> list[float]:
        before = counters(backend)
        if backend.rank == 0:
            backend.send(1, b"three")
            backend.send(1, b"")
        elif backend.rank == 1:
            assert backend.recv(0, 5) + backend.recv(0, 0) == b"three"
        after = counters(backend)
        return [
            after[f"network.{what}_{way}"] - before[f"network.{what}_{way}"]
            for what in ("messages", "bytes")
            for way in ("sent", "received")
        ]

    with BACKENDS[name](2) as group:
        assert run_ranks(group.backends, rank) == [[2, 0, 5, 0], [0, 2, 0, 5]]


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_run_in_the_order_of_issue(name: str) -> None:
    """A synchronous call waits for those before it, and sees what they wrote."""

    def rank(backend: Backend) -> list[int]:
        array, handles, seen = np.ones(9, np.int64), [], []
        for number in range(12):
            handle = all_reduce(backend, array, async_op=number % 3 > 0)
            if number % 3 == 0:
                assert all(it.done() for it in handles)
                seen.append(int(array[-1]))
            else:
                handles.append(handle)
        assert [handle.wait() is array for handle in handles] == [True] * 8
        assert counters(backend)["all_reduce.completed"] == 12
        assert counters(backend)["all_reduce.bytes_processed"] == 12 * array.nbytes
        return [*seen, int(array[0])]

    with BACKENDS[name](3) as group:
        assert (
            run_ranks(group.backends, rank)
            == [[3 ** (3 * it + 1) for it in range(4)] + [3**12]] * 3
        )


@pytest.mark.parametrize("elements", [9, 300_000])
@pytest.mark.parametrize("name", BACKENDS)
def test_groups_may_be_used_in_opposite_order(name: str, elements: int) -> None:
    """Rank by rank in another order: what is issued in the background does not stand in the way."""

    def rank(backend: Backend) -> list[float]:
        groups = [SubBackend(backend, range(3)) for _ in range(2)]
        arrays = [np.full(elements, 1.0 + number) for number in range(2)]
        order = [0, 1] if backend.rank == 1 else [1, 0]
        for _ in range(3):
            first, second = order
            handle = all_reduce(groups[first], arrays[first], async_op=True)
            all_reduce(groups[second], arrays[second])
            handle.wait()
        return [float(array.min()) for array in arrays]

    with BACKENDS[name](3) as group:
        assert run_ranks(group.backends, rank) == [[27.0, 54.0]] * 3


@pytest.mark.parametrize("name", TRANSPORTS)
def test_nothing_may_come_before_it_is_awaited(name: str) -> None:
    def rank(backend: Backend) -> list[int]:
        nothing = [np.zeros(0, np.float32)] * 2
        if backend.rank == 0:
            handle = operations.all_to_all(backend, nothing, out=nothing, async_op=True)
            with pytest.raises(Timeout):
                handle.wait(0.05)
            backend.send(1, b"!")
            return [array.size for array in handle.wait()]
        backend.recv(0, 1)
        return [array.size for array in operations.all_to_all(backend, nothing, out=nothing)]

    with TRANSPORTS[name](2) as group:
        assert run_ranks(group.backends, rank) == [[0, 0]] * 2


def test_a_group_is_freed_after_calls_in_the_background() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    view = SubBackend(backend, [0])
    all_reduce(view, np.ones(1), async_op=True).wait()
    is_freed = threading.Event()
    weakref.finalize(view, is_freed.set)
    del view
    gc.collect()
    assert is_freed.wait(FREED_SECONDS)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 1), (0, 1, 1, 1, 1, 2, 3)])
def test_hosts_change_the_way_and_not_the_result(hosts: tuple[int, ...]) -> None:
    """Segments of the route "two_level" follow each other in several rounds at once."""

    def rank(backend: Backend) -> list[bytes]:
        backend.hosts = hosts
        return [
            all_reduce(
                backend, np.arange(size, dtype=np.int64) * (backend.rank + 1), route="two_level"
            ).tobytes()
            for size in (1, 3, 7, 1000)
        ]

    factor = sum(range(1, len(hosts) + 1))
    expected = [(np.arange(size, dtype=np.int64) * factor).tobytes() for size in (1, 3, 7, 1000)]
    for found in run_ranks(SimulatedBackend.create_group(len(hosts)), rank):
        assert found == expected
