"""The order of a ring, and when a link is measured."""

import math
import random
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.contracts.errors import WireError
from muster.mesh.messages import Measured, decode, encode
from muster.mesh.topology import (
    EXACT_NODES,
    MEASURE_AGAIN_SECONDS,
    Link,
    improved_ring,
    is_due,
    ring,
    slowest,
)

SPEEDS = st.sampled_from([1e6, 5e6, 1e7, 1e8, 1.2e8])


@st.composite
def households(draw: st.DrawFn, most: int) -> tuple[list[str], dict[tuple[str, str], float]]:
    """Nodes in any order, and some of their links."""
    ids = [f"{number:02}" for number in range(draw(st.integers(2, most)))]
    pairs = draw(st.sets(st.sampled_from(list(combinations(ids, 2)))))
    return draw(st.permutations(ids)), {pair: draw(SPEEDS) for pair in sorted(pairs)}


def random_household(seed: int, count: int) -> tuple[list[str], dict[tuple[str, str], float]]:
    chance = random.Random(seed)  # noqa: S311  repeatable, not secret
    ids = [f"{number:02}" for number in range(count)]
    return ids, {pair: chance.uniform(1e6, 1.2e8) for pair in combinations(ids, 2)}


@settings(max_examples=30)
@given(households(7))
def test_a_small_ring_is_that_of_all_permutations(
    household: tuple[list[str], dict[tuple[str, str], float]],
) -> None:
    ids, bandwidths = household
    orders = [(min(ids), *rest) for rest in permutations(sorted(ids)[1:])]
    best = min(orders, key=lambda order: (-slowest(order, bandwidths), order))
    assert ring(ids, bandwidths) == best


@settings(max_examples=20)
@given(households(12), st.randoms(use_true_random=False))
def test_all_nodes_find_the_same_ring(
    household: tuple[list[str], dict[tuple[str, str], float]], chance: random.Random
) -> None:
    ids, bandwidths = household
    order = ring(ids, bandwidths)
    assert sorted(order) == sorted(ids)
    assert order[0] == min(ids)
    assert order[1] <= order[-1]
    mixed = chance.sample(sorted(bandwidths.items()), len(bandwidths))
    assert ring(chance.sample(ids, len(ids)), dict(mixed)) == order


@pytest.mark.slow
def test_a_large_ring_is_nearly_the_best() -> None:
    worst = 0.0
    for seed in range(20):
        ids, bandwidths = random_household(seed, EXACT_NODES)
        best, good = ring(ids, bandwidths), improved_ring(ids, bandwidths)
        worst = max(worst, slowest(best, bandwidths) / slowest(good, bandwidths))
    assert 1.0 <= worst <= 1.5


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_nodes_are_their_own_ring(count: int) -> None:
    ids = ["00"][:count]
    assert ring(ids, {}) == tuple(ids)


OLD = Link(nodes=("a", "b"), bytes_per_second=1e8, measured_at=0.0, addresses=frozenset({"a"}))


@pytest.mark.parametrize(
    ("own", "last", "addresses", "now", "expected"),
    [
        ("1", None, "a", 0.0, True),
        ("3", None, "a", 0.0, False),
        ("1", OLD, "a", 10 * MEASURE_AGAIN_SECONDS, False),
        ("1", OLD, "b", MEASURE_AGAIN_SECONDS - 1, False),
        ("1", OLD, "b", MEASURE_AGAIN_SECONDS, True),
        ("3", OLD, "b", MEASURE_AGAIN_SECONDS, False),
    ],
)
def test_a_link_is_measured_when_new_or_moved(
    own: str, last: Link | None, addresses: str, now: float, *, expected: bool
) -> None:
    assert is_due(own, "2", last, frozenset({addresses}), now) is expected


@pytest.mark.parametrize("speed", [math.nan, math.inf, 0.0, -1.0])
def test_a_speed_that_has_no_place_in_an_order_is_refused(speed: float) -> None:
    said = Link(nodes=("a", "b"), bytes_per_second=speed, measured_at=0.0, addresses=frozenset())
    with pytest.raises(WireError):
        decode(encode(Measured(links={("a", "b"): said})))
