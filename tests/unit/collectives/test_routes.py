"""Routes, played by all ranks of a simulated group, and the rules that choose one."""

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.collectives.errors import Unsupported
from muster.collectives.routes import (
    ROUTES,
    RULES,
    SEGMENTS,
    Piece,
    Problem,
    Round,
    Route,
    choose,
    route_of,
    sent_elements,
    sent_messages,
)
from muster.contracts.shards import ranges

NAMES = [(operation, name) for operation, routes in ROUTES.items() for name in routes]

Value = int | None | tuple["Value", ...]
"""A rank's own value of an element (its number is rank · total + element), the combination of
values in this order, or None for an element that the operation does not define."""


def problem_of(sizes: list[int], root: int = 0, ranks_of_hosts: list[int] | None = None) -> Problem:
    hosts = [host for host, ranks in enumerate(ranks_of_hosts or []) for _ in range(ranks)]
    return Problem(
        world_size=len(sizes), bounds=(0, *accumulate(sizes)), root=root, hosts=tuple(hosts)
    )


def even(world_size: int, total: int, hosts: int = 1) -> Problem:
    sizes = [stop - start for start, stop in ranges(total, world_size)]
    return problem_of(sizes, 0, [stop - start for start, stop in ranges(world_size, hosts)])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    last = draw(st.integers(0, 63))
    sizes = draw(st.lists(st.integers(0, 3), min_size=last + 1, max_size=last + 1))
    cuts = sorted(draw(st.sets(st.integers(1, last)))) if last else []
    hosts = [stop - start for start, stop in pairwise([0, *cuts, len(sizes)])]
    return problem_of(sizes, draw(st.integers(0, last)), hosts)


def part(problem: Problem, rank: int) -> range:
    return range(problem.bounds[rank], problem.bounds[rank + 1])


def owner(problem: Problem, element: int) -> int:
    return next(rank for rank in range(problem.world_size) if element in part(problem, rank))


def contributors(operation: str, rank: int, problem: Problem) -> dict[int, list[int]]:
    """Return the elements that `rank` gets, and the ranks whose values each combines."""
    everything, own = range(problem.bounds[-1]), part(problem, rank)
    everyone = list(range(problem.world_size))
    match operation:
        case "all_reduce":
            return dict.fromkeys(everything, everyone)
        case "reduce":
            return dict.fromkeys(everything, everyone) if rank == problem.root else {}
        case "reduce_scatter":
            return dict.fromkeys(own, everyone)
        case "broadcast":
            return {element: [problem.root] for element in everything}
        case "scatter":
            return {element: [problem.root] for element in own}
        case "gather" if rank != problem.root:
            return {}
        case _:
            return {element: [owner(problem, element)] for element in everything}


def before(operation: str, rank: int, problem: Problem) -> list[Value]:
    """Return a rank's buffer before the operation."""
    defined: range = range(problem.bounds[-1])
    if operation in {"gather", "all_gather"}:
        defined = part(problem, rank)
    elif operation in {"broadcast", "scatter"} and rank != problem.root:
        defined = range(0)
    total = problem.bounds[-1]
    return [rank * total + element if element in defined else None for element in range(total)]


def play(operation: str, name: str, problem: Problem) -> list[list[Value]]:
    """Play all ranks in lockstep; every message is received in the round in which it is sent."""
    everyone = range(problem.world_size)
    routes = [route_of(operation, name, rank, problem) for rank in everyone]
    assert len({len(route) for route in routes}) == 1
    buffers = [before(operation, rank, problem) for rank in everyone]
    for turns in zip(*routes, strict=True):
        mail: dict[tuple[int, int], deque[tuple[Piece, list[Value]]]] = defaultdict(deque)
        for rank, turn in enumerate(turns):
            check_overlaps(turn, is_whole=name == "whole")
            for piece in turn.sends:
                values = buffers[rank][piece.start : piece.stop]
                mail[rank, piece.peer].append((piece, values))
        for rank, turn in enumerate(turns):
            terms: dict[tuple[int, int], dict[int, list[Value]]] = defaultdict(dict)
            for piece in turn.copies + turn.adds:
                (_, start, stop), values = mail[piece.peer, rank].popleft()
                assert (start, stop) == (piece.start, piece.stop)
                if piece in turn.adds:
                    terms[start, stop][piece.peer] = values
                else:
                    buffers[rank][start:stop] = values
            for (start, stop), by_rank in terms.items():
                by_rank[rank] = buffers[rank][start:stop]
                in_order = [by_rank[peer] for peer in sorted(by_rank)]
                buffers[rank][start:stop] = list(zip(*in_order, strict=True))
        assert not any(mail.values())
    return buffers


def check_overlaps(turn: Round, *, is_whole: bool) -> None:
    """Check what `Round` promises about pieces that overlap."""
    assert all(piece.start < piece.stop for pieces in turn for piece in pieces)
    ways = [(piece.start, piece.stop, "copy") for piece in turn.copies]
    ways += {(piece.start, piece.stop, "add") for piece in turn.adds}
    if not is_whole:
        ways += {(piece.start, piece.stop, "send") for piece in turn.sends}
    last: dict[str, int] = {}
    for start, stop, way in sorted(ways):
        others = [end for other, end in last.items() if {way, other} != {"send"}]
        assert max(others, default=0) <= start
        last[way] = max(stop, last.get(way, 0))


def leaves(value: Value) -> Iterator[int]:
    stack = [value]
    while stack:
        match stack.pop():
            case tuple(values):
                stack += values
            case int(number):
                yield number
            case None:
                yield -1


def check(operation: str, name: str, problem: Problem) -> None:
    buffers = play(operation, name, problem)
    total = problem.bounds[-1]
    for rank, buffer in enumerate(buffers):
        for element, ranks in contributors(operation, rank, problem).items():
            if operation == "all_reduce" and rank:
                assert buffer[element] == buffers[0][element]
            else:
                assert sorted(leaves(buffer[element])) == [
                    contributor * total + element for contributor in ranks
                ]


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "name"), NAMES)
@settings(derandomize=True, max_examples=25)
@given(problems())
def test_each_contribution_arrives_once_in_one_order(
    operation: str, name: str, problem: Problem
) -> None:
    check(operation, name, problem)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "name"), NAMES)
@pytest.mark.parametrize(("world_size", "hosts"), [(129, 5), (257, 257), (512, 64)])
def test_both_ends_agree_in_large_groups(
    operation: str, name: str, world_size: int, hosts: int
) -> None:
    problem = even(world_size, 3 * world_size, hosts)
    rank = world_size // 2
    route = route_of(operation, name, rank, problem)
    peers = {piece.peer for turn in route for pieces in turn for piece in pieces}
    for peer in peers:
        other = route_of(operation, name, peer, problem)
        assert between(route, peer) == [(received, sent) for sent, received in between(other, rank)]


def between(route: Route, peer: int) -> list[tuple[list[range], list[range]]]:
    """Return the ranges that go to and come from `peer`, by round."""
    return [
        (
            [range(*piece[1:]) for piece in turn.sends if piece.peer == peer],
            [range(*piece[1:]) for piece in turn.copies + turn.adds if piece.peer == peer],
        )
        for turn in route
    ]


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4, 7, 16, 33, 64, 255, 1024, 2047, 4096])
def test_rounds_and_bytes_are_as_theory_says(n: int) -> None:
    depth, part, children = n.bit_length() - 1, 1 / n, min(2, n - 1)
    expected = {
        # rounds, buffers that rank 0 sends, messages that it sends
        ("all_reduce", "ring"): (2 * (n - 1), 2 * (n - 1) * part, 2 * (n - 1)),
        ("all_reduce", "tree"): (2 * depth, children, children),
        ("all_reduce", "centralised"): (2, n - 1, n - 1),
        ("all_reduce", "direct"): (2, 2 * (n - 1) * part, 2 * (n - 1)),
        ("all_reduce", "whole"): (1, n - 1, n - 1),
        ("reduce", "tree"): (depth, 0, 0),
        ("reduce", "direct"): (1, 0, 0),
        ("reduce", "ring"): (n, (n - 1) * part, n - 1),
        ("broadcast", "tree"): (depth, children, children),
        ("broadcast", "direct"): (1, n - 1, n - 1),
        ("broadcast", "ring"): (n, 2 * (n - 1) * part, 2 * (n - 1)),
        ("gather", "direct"): (1, 0, 0),
        ("scatter", "direct"): (1, (n - 1) * part, n - 1),
        ("reduce_scatter", "ring"): (n - 1, (n - 1) * part, n - 1),
        ("reduce_scatter", "direct"): (1, (n - 1) * part, n - 1),
        ("all_gather", "ring"): (n - 1, (n - 1) * part, n - 1),
        ("all_gather", "direct"): (1, (n - 1) * part, n - 1),
    }
    for (operation, name), (rounds, buffers, messages) in expected.items():
        route = route_of(operation, name, 0, even(n, 1000 * n))
        assert (len(route), sent_messages(route)) == (rounds, messages)
        assert sent_elements(route) == pytest.approx(buffers * 1000 * n, rel=0.01)


def test_two_level_route_sends_one_buffer_per_host() -> None:
    problem = even(4096, 1 << 20, hosts=512)
    leader, member = (route_of("all_reduce", "two_level", rank, problem) for rank in (8, 9))
    assert len(leader) == len(member) == 2 + 2 * 511 + SEGMENTS - 1
    assert sent_elements(member) == 1 << 20
    assert sent_elements(leader) == (7 << 20) + 2 * 511 * (1 << 20) // 512


def test_tree_sends_up_once_and_down_to_each_child() -> None:
    inner = route_of("all_reduce", "tree", 1, even(7, 10))
    assert inner == (
        Round(adds=(Piece(3, 0, 10), Piece(4, 0, 10))),
        Round(sends=(Piece(0, 0, 10),)),
        Round(copies=(Piece(0, 0, 10),)),
        Round(sends=(Piece(3, 0, 10), Piece(4, 0, 10))),
    )


def test_unknown_route_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Unsupported, match="no route 'star': use one of ring, direct"):
        route_of("all_gather", "star", 0, even(2, 2))


KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("operation", "size_bytes", "ranks", "hosts", "route"),
    [
        ("all_reduce", MIB - 1, 2, 2, "whole"),
        ("all_reduce", MIB, 2, 1, "direct"),
        ("all_reduce", MIB, 2, 2, "ring"),
        ("all_reduce", 4096, 8, 8, "whole"),
        ("all_reduce", 4097, 8, 8, "direct"),
        ("all_reduce", 4096, 8, 1, "tree"),
        ("all_reduce", MIB, 9, 1, "direct"),
        ("all_reduce", MIB - 1, 9, 9, "tree"),
        ("all_reduce", MIB, 9, 9, "ring"),
        ("all_reduce", MIB - 1, 12, 3, "tree"),
        ("all_reduce", MIB, 12, 3, "two_level"),
        ("reduce", MIB, 2, 2, "direct"),
        ("broadcast", MIB - 1, 3, 3, "tree"),
        ("broadcast", MIB, 3, 1, "tree"),
        ("gather", MIB, 64, 8, "direct"),
        ("scatter", MIB, 64, 8, "direct"),
        ("all_gather", MIB, 8, 8, "direct"),
        ("reduce_scatter", MIB, 9, 9, "ring"),
    ],
)
def test_route_is_chosen_by_size_and_group(
    operation: str, size_bytes: int, ranks: int, hosts: int, route: str
) -> None:
    assert choose(operation, size_bytes, even(ranks, 0, hosts)) == route


def test_rules_cover_every_case_of_every_operation() -> None:
    assert RULES.keys() == ROUTES.keys()
    for operation, rules in RULES.items():
        assert {rule.route for rule in rules} <= ROUTES[operation].keys()
        assert rules[-1]._replace(route="") == type(rules[-1])("")
