"""Whatever happens to a group, and however large it is: the same bits, every sample once.

And the controls: what would break that promise is noticed.
"""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from muster.collectives.backend import Backend
from muster.collectives.operations import all_gather_bytes
from muster.collectives.reduction.compressed import KINDS
from muster.collectives.reduction.message_reducer import MessageReducer
from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.tree import Block, BlockAssignment
from muster.datasets.index import Line
from muster.datasets.random_access import Numbers, RandomAccess
from muster.program import Batch, Contribution, InvalidProgram, State
from muster.training.groups.state_sync import Replica
from muster.training.groups.updates import GroupChanged
from muster.training.trainer import Outcome
from tests.support.installation import await_value
from tests.support.marks import long
from tests.support.stage import Regression, Stage, write_samples

SAMPLES = 150
STEPS = 20
"""Two epochs of ten."""

MEMBERS_LIMIT = 8
EVENTS = 6

WORLD_SIZES = [1, 2, 3, 4, 5, 7, 8]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"), samples=SAMPLES)


@pytest.fixture(scope="module")
def undisturbed(data: Path) -> str:
    return Stage(data).plays(1).digest


class Fate:
    """What happens to a stage, by chance that can be repeated."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self._stage = stage
        self._chance = random.Random(seed)  # noqa: S311  chance that can be repeated, no secret
        acts = [self._joins, self._leaves, self._dies, self._is_replaced, self._holds]
        for step in self._chance.sample(range(1, STEPS), EVENTS):
            stage.at(step, *self._chance.choices([*acts, self._all_die], [2, 2, 3, 3, 2, 1]))

    def _joins(self) -> None:
        if len(self._stage.members) < MEMBERS_LIMIT:
            self._stage.joins()

    def _leaves(self) -> None:
        if len(self._stage.members) > 1:
            self._stage.leaves(self._random_worker())

    def _dies(self) -> None:
        if len(self._stage.members) > 1:
            self._stage.dies(self._random_worker())

    def _is_replaced(self) -> None:
        victim = self._random_worker()
        self._stage.dies(victim)
        self._stage.joins(rank=self._stage.players[victim].rank)

    def _holds(self) -> None:
        self._stage.holds(self._chance.choice([lambda: None, self._joins, self._dies]))

    def _all_die(self) -> None:
        for player in list(self._stage.members):
            self._stage.dies(player.worker_id)
        for _ in range(self._chance.randint(1, 3)):
            self._stage.joins()

    def _random_worker(self) -> int:
        return self._chance.choice(self._stage.members).worker_id


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_changes_a_bit_or_loses_a_sample(
    data: Path, undisturbed: str, world_size: int, seed: int
) -> None:
    stage = Stage(data, replay_every=[None, 3][seed % 2])
    Fate(stage, seed=100 * world_size + seed)
    stage.plays(world_size)
    assert stage.digest == undisturbed
    assert is_exact(stage)
    assert stage.disputes == []


@pytest.fixture(scope="module")
def undisturbed_compressed(data: Path) -> dict[str, str]:
    return {kind: Stage(data, compression=kind).plays(1).digest for kind in KINDS}


@pytest.mark.parametrize("hosts", [*map(long, [1, 3]), 2, 5])
@pytest.mark.parametrize("world_size", [2, 3, long(8)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_changes_a_bit_of_compressed_sums(
    data: Path, undisturbed_compressed: dict[str, str], kind: str, world_size: int, hosts: int
) -> None:
    stage = Stage(data, compression=kind, hosts=hosts, replay_every=[None, 3][world_size % 2])
    Fate(stage, seed=100 * world_size + hosts)
    stage.plays(world_size)
    assert stage.digest == undisturbed_compressed[kind]
    assert is_exact(stage)
    assert stage.disputes == []


def test_each_kind_has_bits_of_its_own(
    undisturbed: str, undisturbed_compressed: dict[str, str]
) -> None:
    assert len({undisturbed, *undisturbed_compressed.values()}) == 1 + len(KINDS)


def is_exact(stage: Stage) -> bool:
    """Whether every sample of both epochs was read once, by what travelled with the sums."""
    epochs = stage.finished[0].replica.committed.epochs
    assert [epoch.epoch for epoch in epochs] == [0, 1]
    return all(
        (epoch.samples, epoch.hash_sum) == (SAMPLES, epoch.expected_hash_sum) for epoch in epochs
    )


def test_full_disk_delays_only_the_last_checkpoint(data: Path, undisturbed: str) -> None:
    stage = Stage(data)
    stage.full_at = [4, 20, 20]
    assert stage.plays(2).digest == undisturbed
    assert stage.unkept == [4, 20, 20]
    assert stage.kept is not None
    assert stage.kept[1].position.step == 20
    assert len(stage.finished) == 2


@pytest.mark.parametrize(("full_at", "saved"), [([], [5, 20]), ([5, 6], [7, 20])])
def test_requested_checkpoint_is_saved_before_the_next_step(
    data: Path, undisturbed: str, full_at: list[int], saved: list[int]
) -> None:
    stage = Stage(data, checkpoint_every=1000)
    stage.full_at = [*full_at]
    stage.at(5, stage.saves_now)
    assert stage.plays(2).digest == undisturbed
    assert (stage.saved, stage.unkept) == (saved, full_at)


def test_paused_group_saves_a_requested_checkpoint(data: Path, undisturbed: str) -> None:
    stage = Stage(data, checkpoint_every=1000)
    stage.at(5, lambda: stage.holds(save=True))
    assert stage.plays(2).digest == undisturbed
    assert stage.saved == [5, 20]


def test_save_that_failed_before_a_new_group_is_missing_at_the_end(data: Path) -> None:
    stage = Stage(data)

    def fail_and_stop() -> None:
        stage.kept = None
        for player in stage.players:
            player.groups.stop()

    stage.at(4, lambda: stage.holds(fail_and_stop)).plays(2)
    assert {player.outcome for player in stage.players} == {Outcome.STOPPED}
    assert stage.kept is not None
    assert stage.kept[1].position.step == 4


def test_replay_does_not_change_bits(data: Path, undisturbed: str) -> None:
    stage = Stage(data, replay_every=3)
    stage.at(5, lambda: stage.dies(1)).at(7, lambda: stage.joins(rank=1))
    assert stage.plays(3).digest == undisturbed


@pytest.mark.parametrize("world_size", [1, 3])
def test_sums_in_lost_memory_are_computed_again(
    data: Path, undisturbed: str, world_size: int
) -> None:
    stage = Stage(data)
    calls = itertools.count(1)

    class Interrupted(Regression):
        """Finds, now and then, that in the middle of a step an agent has taken over."""

        def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
            if next(calls) % 20 == 0:
                stage.gives_new_memory()
            return super().gradient(state, batch, random)

    stage.program = Interrupted
    assert stage.plays(world_size).digest == undisturbed


def test_member_ahead_of_a_growing_group_keeps_its_sums(data: Path, undisturbed: str) -> None:
    stage = Stage(data)
    calls, sums, is_ahead = itertools.count(), itertools.count(1), threading.Event()

    class Counted(Regression):
        def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
            next(calls)
            if stage.reached >= 5 and threading.current_thread().name == "worker-1":
                is_ahead.set()
            return super().gradient(state, batch, random)

    class Late(MessageReducer):
        """The first rank takes a step while the other has begun the next one."""

        def all_reduce(self, assignment: BlockAssignment, **timeout: float) -> Vector:
            total = super().all_reduce(assignment, **timeout)
            if threading.current_thread().name == "worker-0" and next(sums) == 5:
                assert is_ahead.wait(60)
                stage.joins()
            return total

    stage.program, stage.reducer = Counted, Late
    assert stage.plays(2).digest == undisturbed
    # Each worker calls it once to learn the shapes. No part of a step is computed twice.
    assert next(calls) == STEPS * stage.virtual_shards + len(stage.players)


class Forgetful(Regression):
    """Keeps count of its calls, and lets that count."""

    calls = itertools.count()

    def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
        contribution = super().gradient(state, batch, random)
        noise = np.float32(next(self.calls) % 7)
        return Contribution({"weights": contribution.gradients["weights"] + noise}, 0.0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_nondeterministic_program_is_refused(data: Path, world_size: int) -> None:
    with pytest.raises(InvalidProgram, match="came out differently when it was computed again"):
        Stage(data, program=Forgetful, replay_every=5).plays(world_size)


class Faulty(Regression):
    """Runs on a processor that is wrong in one place, for one of its ranks."""

    def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
        contribution = super().gradient(state, batch, random)
        if threading.current_thread().name == "worker-1":
            contribution.gradients["weights"][0] *= np.float32(1 + 1e-6)
        return contribution


def test_rank_that_computes_wrongly_is_removed(data: Path, undisturbed: str) -> None:
    stage = Stage(data, program=Faulty, replay_every=1)
    stage.when_disputed = lambda workers: [stage.leaves(worker) for worker in workers]
    assert stage.plays(3).digest == undisturbed
    assert set(stage.disputes) == {(1,)}


# Controls


class InRankOrder(MessageReducer):
    """The obvious sum: each rank adds up what it has, then the ranks are added up in order."""

    def all_reduce(self, layout: Sequence[Sequence[Block]], **_: object) -> Vector:
        mine = self.slots[: len(layout[self._backend.rank])].sum(axis=0, dtype=np.float32)
        parts = all_gather_bytes(self._backend, mine.tobytes())
        total = np.zeros_like(mine)
        for part in parts:
            total += np.frombuffer(part, np.float32)
        return total


def test_sum_in_rank_order_is_detected(data: Path, undisturbed: str) -> None:
    digests = {size: Stage(data, reducer=InRankOrder).plays(size).digest for size in (1, 3, 5)}
    assert digests[1] == undisturbed
    assert len(set(digests.values())) > 1


class Repeating(RandomAccess):
    """Reads a line twice, and its neighbour never."""

    def draw(self, numbers: Numbers) -> list[Line]:
        return super().draw(np.where(numbers == 7, 8, numbers))


@pytest.mark.parametrize("world_size", [1, 3])
def test_wrong_reader_is_detected_by_the_audit(data: Path, world_size: int) -> None:
    assert not is_exact(Stage(data, drawer=Repeating).plays(world_size))


def flipped(stage: Stage, worker_id: int) -> Callable[[], None]:
    """Return what flips one bit of one weight of a worker that stands still."""

    def flip() -> None:
        replica = stage.players[worker_id].replica
        weights = replica.state["weights"].copy()
        weights.view(np.uint32)[2] ^= 1
        weights.flags.writeable = False
        replica.state = {**replica.state, "weights": weights}

    return flip


def replaces(stage: Stage) -> Callable[[tuple[int, ...]], None]:
    """Return what a coordinator does about a dispute."""

    def replace_them(workers: tuple[int, ...]) -> None:
        for worker in workers:
            stage.leaves(worker)
        for worker in workers:
            stage.joins(rank=stage.players[worker].rank)

    return replace_them


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_worker_with_a_flipped_bit_is_removed(data: Path, undisturbed: str, victim: int) -> None:
    stage = Stage(data)
    stage.when_disputed = replaces(stage)
    stage.at(6, lambda: stage.holds(flipped(stage, victim)))
    assert stage.plays(3).digest == undisturbed
    assert set(stage.disputes) == {(victim,)}
    assert victim not in {player.worker_id for player in stage.finished}


def test_newcomers_get_no_flipped_bit_and_no_vote(data: Path, undisturbed: str) -> None:
    stage = Stage(data)
    stage.when_disputed = replaces(stage)
    meanwhile = [flipped(stage, 0), stage.joins, stage.joins, stage.joins]
    stage.at(6, lambda: stage.holds(lambda: [act() for act in meanwhile]))
    assert stage.plays(3).digest == undisturbed
    assert set(stage.disputes) == {(0,)}


def test_without_a_majority_all_restore_the_checkpoint(data: Path, undisturbed: str) -> None:
    stage = Stage(data)
    stage.when_disputed = replaces(stage)
    stage.at(6, lambda: stage.holds(flipped(stage, 0)))
    assert stage.plays(2).digest == undisturbed
    assert set(stage.disputes) == {(0, 1)}
    assert {player.worker_id for player in stage.finished} == {2, 3}
    began_again_at = [step for _, step in stage.taken if step < 6]
    assert began_again_at[-2:] == [4, 4], "the last checkpoint"


def test_sums_of_an_earlier_step_are_never_used_again(
    data: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(data)
    calls, received = itertools.count(1), itertools.count()
    receive = Replica.receive

    class Late(MessageReducer):
        """The last rank sums a step with the others, and leaves the group before it takes it."""

        def all_reduce(self, assignment: BlockAssignment, **timeout: float) -> Vector:
            total = super().all_reduce(assignment, **timeout)
            if threading.current_thread().name == "worker-2" and next(calls) == 5:
                await_value(lambda: stage.reached >= 5, str)
                stage.resumes()
                raise GroupChanged
            return total

    def receive_in_vain(replica: Replica, backend: Backend, peer: int) -> None:
        has_sums = not replica.is_empty
        receive(replica, backend, peer)
        if has_sums and next(received) == 0:  # the group ends between the state and its first step
            stage.resumes()
            raise GroupChanged

    monkeypatch.setattr(Replica, "receive", receive_in_vain)
    stage.reducer = Late
    assert stage.plays(3).digest == undisturbed
    assert next(received) > 0
