"""The members of a new group reach one step and one state."""

import os
import platform
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from muster.collectives.errors import PeerRefused
from muster.collectives.reduction.tree import Block, assign_blocks
from muster.collectives.simulated import SimulatedBackend, run_ranks
from muster.contracts.shards import Position
from muster.datasets.index import Totals
from muster.runtime.fingerprint import ANY_BITS, Fingerprint, fingerprint
from muster.training.groups import state_sync
from muster.training.groups.group import WorkersDiverged
from muster.training.groups.state_sync import (
    UNKNOWN,
    Committed,
    InPlaceReplica,
    Replica,
    SyncResult,
    sync_state,
    take_first_state,
)

LEAVES = 8
SHAPE = {"weights": np.zeros(3, np.float32)}


def at(step: int, value: float = 1.0) -> Replica:
    replica = Replica(SHAPE)
    if step >= 0:
        committed = Committed(position=Position(step=step))
        replica.commit({"weights": np.full(3, value, np.float32)}, committed)
    return replica


def taken_up(
    replicas: Sequence[Replica],
    held: Sequence[Sequence[Block]] | None = None,
    prints: Sequence[Fingerprint] | None = None,
    begin: Callable[[int], None] = lambda _: None,
    end: Callable[[int], object] = lambda _: None,
    totals: Sequence[Totals] | None = None,
) -> list[SyncResult | WorkersDiverged | PeerRefused]:
    """Return the result of each member."""

    def run(backend: object) -> SyncResult | WorkersDiverged | PeerRefused:
        rank = backend.rank
        try:
            result = sync_state(
                backend,
                replicas[rank],
                held[rank] if held else (),
                LEAVES,
                prints[rank] if prints else fingerprint(),
                lambda: begin(rank),
                totals[rank] if totals else UNKNOWN,
            )
        except (WorkersDiverged, PeerRefused) as error:
            return error
        end(rank)
        return result

    return run_ranks(SimulatedBackend.create_group(len(replicas)), run)


def test_members_behind_get_the_furthest_state() -> None:
    replicas = [at(4, 0.5), at(5), at(-1), at(5)]
    taken_up(replicas)
    assert {replica.digest() for replica in replicas} == {at(5).digest()}


def test_first_member_loads_if_no_member_has_a_state() -> None:
    replicas = [at(-1), at(-1), at(-1)]
    began: list[int] = []

    def begin(rank: int) -> None:
        began.append(rank)
        replicas[rank].commit(dict(at(0).state), at(0).committed)

    taken_up(replicas, begin=begin)
    assert began == [0]
    assert {replica.digest() for replica in replicas} == {at(0).digest()}


def test_only_sums_of_the_furthest_step_are_kept() -> None:
    held = [[Block(1, 0)], [Block(0, 6)], [Block(1, 1)]]
    results = taken_up([at(5), at(5), at(4, 0.5)], held)
    expected = assign_blocks([held[0], held[1], []], LEAVES)
    assert [result.assignment for result in results] == [expected] * 3


class Newcomer(Replica):
    """Copies the state once it `may_copy`."""

    def __init__(self) -> None:
        super().__init__(SHAPE)
        self.may_copy = threading.Event()

    def copy(self, memory: int, committed: Committed, digest: str) -> bool:
        assert self.may_copy.wait(10)
        return super().copy(memory, committed, digest)


@pytest.mark.parametrize("quick_bytes", [0, 1 << 20])
def test_members_do_not_wait_for_a_newcomer_that_copies(
    quick_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_sync, "QUICK_COPY_BYTES", quick_bytes)
    held = [[Block(0, 6)], [], []]
    replicas = [at(5), newcomer := Newcomer(), at(5)]
    results = taken_up(replicas, held, end=lambda rank: rank == 0 and newcomer.may_copy.set())
    first, third = assign_blocks([held[0], []], LEAVES)
    expected = assign_blocks(held, LEAVES) if quick_bytes else [first, (), third]
    assert [result.assignment for result in results] == [expected] * 3
    assert newcomer.digest() == replicas[0].digest()


def test_newcomer_does_not_keep_a_torn_copy() -> None:
    first, newcomer = at(5), Newcomer()

    def take_two_steps(_rank: int) -> None:
        for step in (6, 7):  # without the newcomer; the second one writes to the copied memory
            state = {"weights": np.full(3, step, np.float32)}
            first.commit(state, Committed(position=Position(step=step)))
        newcomer.may_copy.set()

    result, refused = taken_up([first, newcomer], end=take_two_steps)
    assert isinstance(result, SyncResult)
    assert isinstance(refused, PeerRefused)
    assert newcomer.is_empty


@pytest.mark.parametrize("other", [{"address": (os.getpid(), 0, 0)}, {"namespace": "another boot"}])
def test_newcomer_that_cannot_read_the_memory_is_sent_the_state(other: dict[str, object]) -> None:
    class Sent(Replica):
        def copy(self, *_: object) -> bool:
            raise AssertionError("it has opened a file of another host's pid")

    first = type("Elsewhere", (Replica,), other)(SHAPE)
    first.commit(dict(at(5).state), at(5).committed)
    replicas = [first, Sent(SHAPE)]
    results = taken_up(replicas)
    assert all(result.assignment == assign_blocks([[], []], LEAVES) for result in results)
    assert replicas[1].digest() == first.digest()


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_divergent_member_is_named_and_sends_no_state(odd: int) -> None:
    replicas = [at(5, 9.0 if place == odd else 1.0) for place in range(3)] + [at(-1), at(-1)]
    found = taken_up(replicas)
    assert all(isinstance(one, WorkersDiverged) and one.members == (odd,) for one in found)
    assert [one.includes_this_rank for one in found] == [place == odd for place in range(5)]
    assert replicas[3].is_empty
    assert replicas[4].is_empty


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ([1, 2], (0, 1)),
        ([1, 1, 2, 2], (0, 1, 2, 3)),
        ([1, 2, 2, 3], (0, 3)),
        ([1, 2, 3], (0, 1, 2)),
    ],
)
def test_without_a_majority_all_are_refused(values: list[int], odd: tuple[int, ...]) -> None:
    found = taken_up([at(5, value) for value in values])
    assert [one.members for one in found] == [odd] * len(values)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Replica, "weights, position: stopped before the next step. update() may depend on its"),
        (
            InPlaceReplica,
            "run.values.best, weights, position: stopped before the next step. What a",
        ),
    ],
)
def test_what_differs_is_named(kind: type[Replica], said: str) -> None:
    replicas = [kind(SHAPE) for _ in range(4)]
    for place, replica in enumerate(replicas[:3]):
        values = {"values": {"best": place, "same": 1}, "loss": 1, "objects": {}}
        committed = Committed(
            position=Position(step=5),
            is_stopped=place == 1,
            values=b"" if kind is Replica else msgspec.json.encode(values),
        )
        replica.commit({"weights": np.full(3, place, np.float32)}, committed)
    found = taken_up(replicas)  # the last one is new: it takes part, and says the same
    assert {str(one) for one in found} == {
        f"the state of 3 of 3 workers differs from that of the others at the same step, in {said}"
        + str(found[0]).partition(said)[2]
    }
    assert {one.entries for one in found} == {tuple(said.partition(":")[0].split(", "))}


@pytest.mark.parametrize(
    ("first", "second", "entries", "said"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ("the order of values",), "in the order of values:"),
        (
            dict.fromkeys("abcde", 1),
            dict.fromkeys("abcd", 2),
            tuple(f"run.values.{it}" for it in "abc"),
            "in run.values.a, run.values.b, run.values.c and 2 more:",
        ),
        ({"n" * 200: 1}, {}, ("run.values." + "n" * 89,), "n:"),
    ],
    ids=["order", "many", "long"],
)
def test_names_of_what_differs_are_few_and_short(
    first: dict[str, int], second: dict[str, int], entries: tuple[str, ...], said: str
) -> None:
    replicas = [InPlaceReplica(SHAPE), InPlaceReplica(SHAPE)]
    for replica, values in zip(replicas, (first, second), strict=True):
        encoded = msgspec.json.encode({"values": values})
        committed = Committed(position=Position(step=5), values=encoded)
        replica.commit({"weights": np.ones(3, np.float32)}, committed)
    one, _ = taken_up(replicas)
    assert one.entries == entries
    assert said in str(one)


def test_member_with_other_arithmetic_is_refused() -> None:
    ours = fingerprint()
    other = Fingerprint(digest="0" * 32, facts={**ours.facts, "numpy": "0.1"})
    replicas = [at(5), at(5), at(-1)]
    found = taken_up(replicas, prints=[ours, ours, other])
    assert [one.members for one in found] == [(2,)] * 3
    assert replicas[2].is_empty


def test_members_that_have_drifted_take_the_first_state() -> None:
    replicas = [at(5, 1), at(5, 2), at(5, 1)]
    group = SimulatedBackend.create_group(3)
    run_ranks(group, lambda backend: take_first_state(backend, replicas[backend.rank]))
    assert [it.digest() for it in replicas] == [at(5, 1).digest()] * 3


def test_any_bits_let_a_member_take_the_state_of_the_first() -> None:
    prints = [Fingerprint(digest=ANY_BITS, facts={"numpy": name}) for name in "abc"]
    replicas = [at(5, 1), at(5, 2), at(-1)]
    found = taken_up(replicas, prints=prints)
    assert all(isinstance(one, SyncResult) for one in found)
    assert len({replica.digest() for replica in replicas}) == 1
    assert replicas[1].digest() == at(5, 1).digest()


@pytest.mark.parametrize("other", [Totals(lines=64, hash_sum=2), Totals(lines=63, hash_sum=1)])
def test_member_with_other_data_is_refused(other: Totals) -> None:
    same = Totals(lines=64, hash_sum=1)
    replicas = [at(5), at(5), at(-1)]
    found = taken_up(replicas, totals=[same, same, other])
    assert [one.members for one in found] == [(2,)] * 3
    assert f"{other.lines} lines (hash sum {other.hash_sum:016x})" in str(found[0])
    assert "64 lines (hash sum 0000000000000001)" in str(found[0])
    assert platform.node() in str(found[0])
    assert replicas[2].is_empty


def test_member_of_an_earlier_version_tells_no_totals() -> None:
    found = taken_up([at(5), at(5)], totals=[UNKNOWN, Totals(lines=64, hash_sum=1)])
    assert all(isinstance(one, SyncResult) for one in found)
