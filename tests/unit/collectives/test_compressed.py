"""Compressed sums: the same bits for every assignment of groups, and how far they are off."""

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from muster.collectives.compression import shared_scale
from muster.collectives.compression.shared_scale import CHUNK_ELEMENTS, Dither
from muster.collectives.reduction.compressed import KINDS, Compression
from muster.collectives.reduction.host_reducer import ArenaHostReducer, HostReducer
from muster.collectives.reduction.message_reducer import MessageReducer
from muster.collectives.reduction.reducer import Reducer, Vector
from muster.collectives.reduction.summation import add_up, plan_of
from muster.collectives.reduction.tree import Block, assign_blocks
from muster.collectives.simulated import SimulatedBackend
from tests.support.arenas import Host
from tests.support.stage import compression_of

LEAVES = 16
TAIL = 9
NAN_BITS = 0x7FC00000


def sum_of(leaves: Sequence[Vector]) -> Vector:
    out = np.empty_like(leaves[0])
    add_up(plan_of([Block(0, number) for number in range(len(leaves))]), leaves, out)
    return out


def leaves_of(elements: int, seed: int = 0) -> list[Vector]:
    return list(np.random.default_rng(seed).standard_normal((LEAVES, elements), np.float32))


def on_one_host(found: Compression, leaves: Sequence[Vector], step: int = 0) -> Vector:
    found.begin(step)
    out = np.empty_like(leaves[0])
    found.adder_of([Block(0, number) for number in range(len(leaves))])(leaves, out, 0)
    return out


Made = tuple[Reducer, Compression]


@contextmanager
def reducers(
    kind: str, hosts: Sequence[int], elements: int, groups: int, *, arenas: bool
) -> Iterator[list[Made]]:
    """Yield those of ranks on these hosts."""
    made: list[Made] = []
    shared = {each: Host(hosts.count(each), elements=elements, slot_count=LEAVES) for each in hosts}
    results = {each: os.memfd_create("result") for each in shared}
    for rank, backend in enumerate(SimulatedBackend.create_group(len(hosts))):
        found, host = compression_of(kind, LEAVES, elements - TAIL, groups), hosts[rank]
        backend.hosts = tuple(hosts)
        slots = np.zeros((LEAVES, elements), np.float32)
        if len(set(hosts)) == 1:
            made.append((MessageReducer(backend, slots, found.adder_of), found))
        elif arenas:
            flags = shared[host].flags(hosts[:rank].count(host))
            made.append((ArenaHostReducer(backend, flags, results[host], found), found))
        else:
            made.append((HostReducer(backend, slots, found), found))
    for result in results.values():
        os.close(result)
    yield made


MORE_HOSTS = [[0, 0, 0], [0, 1], [0, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3, 4]]
HOSTS = [[0, 1, 1, 2], *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_HOSTS)]


@pytest.mark.parametrize("arenas", [False, True])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [4, 16])
def test_bits_do_not_depend_on_hosts_and_ranks(
    kind: str, groups: int, hosts: list[int], *, arenas: bool
) -> None:
    elements, steps = shared_scale.PIECE_ELEMENTS + 1500 + TAIL, 2
    leaves = leaves_of(elements)
    leaves[3][5] = 1e30  # an outlier has a scale of its own
    assignment = assign_blocks([()] * len(hosts), LEAVES, groups, hosts)

    def train(rank: int, made: Made) -> list[bytes]:
        reducer, found = made
        results = []
        for step in range(steps):
            for slot, block in zip(reducer.slots, assignment[rank], strict=False):
                slot[:] = sum_of(leaves[block.start : block.stop])
            found.begin(step)
            results.append(reducer.all_reduce(assignment).tobytes())
        return results

    alone = compression_of(kind, LEAVES, elements - TAIL, groups)
    expected = [on_one_host(alone, leaves, step).tobytes() for step in range(steps)]
    with (
        ThreadPoolExecutor(len(hosts)) as threads,
        reducers(kind, hosts, elements, groups, arenas=arenas) as made,
    ):
        assert list(threads.map(train, range(len(hosts)), made)) == [expected] * len(hosts)


RATIOS = {"int8": 0.25, "bf16": 0.5, "fp16": 0.5, "random": 0.3}


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 0, 1, 1]], ids=str)
@pytest.mark.parametrize(("kind", "ratio"), RATIOS.items())
def test_costs_are_what_one_host_sends_in_a_step(kind: str, ratio: float, hosts: list[int]) -> None:
    elements = shared_scale.PIECE_ELEMENTS + TAIL
    assignment = assign_blocks([()] * len(hosts), LEAVES, 4, hosts)
    whole = 4 * elements * (len(set(hosts)) - 1)

    def train(made: Made) -> dict[str, float]:
        reducer, found = made
        for step in range(2):  # each counts by itself
            found.begin(step)
            reducer.all_reduce(assignment)
        return found.costs()

    with (
        ThreadPoolExecutor(len(hosts)) as threads,
        reducers(kind, hosts, elements, 4, arenas=True) as made,
    ):
        first, *_ = threads.map(train, made)
    assert first["compression.bytes_before"] == whole
    assert first["compression.bytes_after"] == pytest.approx(ratio * whole, rel=0.1)
    assert first["compression.ratio"] == pytest.approx(ratio if whole else 1, rel=0.1)
    assert first["compression.duration_ms"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_do_not_change_bits(kind: str) -> None:
    elements = 3 * shared_scale.PIECE_ELEMENTS + 1500
    leaves = leaves_of(elements)
    leaves[4][20 * 1024 + 5] = np.inf
    found = compression_of(kind, LEAVES, elements - TAIL)
    whole, add = on_one_host(found, leaves), found.adder_of([Block(0, n) for n in range(LEAVES)])
    cuts = [0, 1024, 17 * 1024, 36 * 1024, elements]
    parts = []
    for start, stop in pairwise(cuts):
        parts.append(np.empty(stop - start, np.float32))
        add([leaf[start:stop] for leaf in leaves], parts[-1], start)
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "within"), [("int8", 1 / 15), ("fp16", 1e-3), ("bf16", 8e-3), ("random", None)]
)
def test_sum_is_right_on_average(kind: str, within: float | None) -> None:
    elements = 2000 + TAIL
    leaves = leaves_of(elements)
    found = compression_of(kind, LEAVES, elements - TAIL, 8)
    whole = sum_of(leaves)
    sums = np.array([on_one_host(found, leaves, step) for step in range(400)])
    assert (sums[:, -TAIL:] == whole[-TAIL:]).all(), "loss, weight and counts are exact"
    errors = sums - whole
    scale = np.abs(leaves).max() * LEAVES
    if within is not None:
        assert np.abs(errors).max() <= within * scale
    spread = errors.std(axis=0) / np.sqrt(len(sums))
    if kind in {"int8", "random"}:
        assert (np.abs(errors.mean(axis=0)) <= 6 * spread + 1e-5).all()
        assert errors.std() > 0


@pytest.mark.parametrize("seed", range(30))
def test_sum_of_any_partition_is_exact(seed: int) -> None:
    """Of hosts and orders, and with parts of the sum that wrap."""
    draw = random.Random(seed)  # noqa: S311  repeatable, not secret
    groups, elements = 2 ** draw.randint(0, 6), draw.randint(1, 3000)
    rng = np.random.default_rng(seed)
    rows = list(rng.standard_normal((groups, elements), np.float32) * rng.choice([1, 1e-30, 1e30]))
    if draw.random() < 0.5:
        rows = [np.abs(rows[0])] * groups  # all at the limit
    dither = Dither(seed, groups)
    dither.begin(draw.randint(0, 1000))
    exact = np.zeros(elements, np.int64)
    sent: list[NDArray[np.int8]] = []
    order = draw.sample(range(groups), groups)
    for some in (order[start::3] for start in range(3)):
        sent.append(np.empty(elements, np.int8))
        for piece in shared_scale.pieces(0, elements):
            scales = shared_scale.scales_of(
                shared_scale.maxima_of([row[piece] for row in rows], piece), groups
            )
            rows_of = {group: rows[group][piece] for group in order}
            chosen = [rows_of[group] for group in some]
            sent[-1][piece] = dither.quantize(piece, some, chosen, scales)
            for group in some:
                one = dither.quantize(piece, [group], [rows_of[group]], scales)
                assert np.abs(one).max() <= 127 // groups
                exact[piece] += one
    total = np.zeros(elements, np.int8)
    for part in draw.sample(sent, len(sent)):
        total += part
    assert (total == exact).all()


TINY = np.float32(1e-38)
CHUNKS = [
    ("zeros", [0.0, -0.0], 0.0),
    ("a scale that underflows", [float(TINY), -float(TINY)], 0.0),
    ("denormals", [1e-45, 3e-44], 0.0),
    ("infinity", [np.inf, 1.0], np.nan),
    ("NaN", [1.0, np.nan], np.nan),
    ("both infinities", [np.inf, -np.inf], np.nan),
]


@pytest.mark.parametrize(("name", "values", "expected"), CHUNKS, ids=[name for name, *_ in CHUNKS])
def test_int8_of_a_chunk_without_a_scale(name: str, values: list[float], expected: float) -> None:
    elements = 3 * CHUNK_ELEMENTS
    leaves = [np.ones(elements, np.float32) for _ in range(LEAVES)]
    for number, leaf in enumerate(leaves):
        leaf[CHUNK_ELEMENTS : 2 * CHUNK_ELEMENTS] = 0 if np.isnan(expected) else leaf[0] * 0
        leaf[CHUNK_ELEMENTS + 7] = values[number % len(values)]
    found = on_one_host(compression_of("int8", LEAVES, elements, 8), leaves)
    chunk = found[CHUNK_ELEMENTS : 2 * CHUNK_ELEMENTS]
    wanted = NAN_BITS if np.isnan(expected) else 0
    assert (chunk.view(np.uint32) == wanted).all(), name
    assert np.isfinite(np.delete(found, np.s_[CHUNK_ELEMENTS : 2 * CHUNK_ELEMENTS])).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", range(0, 600, 97))
def test_what_is_not_finite_never_becomes_finite(kind: str, value: float, place: int) -> None:
    leaves = leaves_of(600 + TAIL)
    leaves[5][place] = value
    found = on_one_host(compression_of(kind, LEAVES, 600), leaves)
    assert not np.isfinite(found[place])


def test_fp16_beyond_its_range_is_infinite() -> None:
    leaves = [np.full(10, 5e3, np.float32) for _ in range(LEAVES)]
    assert np.isposinf(on_one_host(compression_of("fp16", LEAVES, 10), leaves)).all()
    assert np.isfinite(on_one_host(compression_of("bf16", LEAVES, 10), leaves)).all()


def test_dither_of_groups_fills_the_unit_interval_evenly() -> None:
    """One group's numbers are at the limit, so that all sums are those of the dither."""
    groups, elements = 8, 5000
    dither = Dither(1, groups)
    dither.begin(3)
    rows, scales = [np.full(elements, 0.5, np.float32)] * groups, np.ones(5, np.float32)
    ups = 0
    for piece in shared_scale.pieces(0, elements):
        parts, own = [row[piece] for row in rows], scales[shared_scale.chunks_of(piece)]
        ups += dither.quantize(piece, range(groups), parts, own).sum(dtype=np.int64)
    # Each element rounds up in exactly half of the groups.
    assert ups == elements * groups // 2
