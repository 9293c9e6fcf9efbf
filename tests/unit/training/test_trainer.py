"""The same bits for every number of ranks and every history, in one process."""

import itertools
import threading
from pathlib import Path

import numpy as np
import pytest

from muster.program import Batch, Contribution, InvalidProgram, State
from tests.support.stage import Regression, Stage, write_samples

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_samples(tmp_path, samples=150)


@pytest.fixture
def undisturbed(data: Path) -> str:
    return Stage(data).plays(1).digest


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
def test_any_number_of_ranks_ends_with_the_same_bits(
    data: Path, undisturbed: str, world_size: int
) -> None:
    assert Stage(data).plays(world_size).digest == undisturbed


def test_a_rank_that_dies_is_replaced_and_nothing_is_lost(data: Path, undisturbed: str) -> None:
    stage = Stage(data)
    stage.at(5, lambda: stage.dies(1)).at(7, lambda: stage.joins(rank=1))
    assert stage.plays(3).digest == undisturbed
    assert {player.worker_id for player in stage.finished} == {0, 2, 3}


def test_growing_and_shrinking_leaves_the_bits_alone(data: Path, undisturbed: str) -> None:
    stage = Stage(data)
    stage.at(3, stage.joins, stage.joins).at(9, lambda: stage.leaves(0))
    assert stage.plays(2).digest == undisturbed


def test_every_sample_of_every_epoch_is_counted_once(data: Path) -> None:
    stage = Stage(data)
    stage.at(4, lambda: stage.dies(0)).at(6, stage.joins).at(11, lambda: stage.dies(2))
    stage.plays(3)
    for epoch in stage.finished[0].replica.committed.epochs:
        assert (epoch.samples, epoch.hash_sum) == (150, epoch.expected_hash_sum)
    assert [epoch.epoch for epoch in stage.finished[0].replica.committed.epochs] == [0, 1]


def test_a_full_disk_ends_nobody_and_the_last_checkpoint_is_waited_for(
    data: Path, undisturbed: str
) -> None:
    stage = Stage(data)
    stage.full_at = [4, 20, 20]
    assert stage.plays(2).digest == undisturbed
    assert stage.unkept == [4, 20, 20]
    assert stage.kept is not None
    assert stage.kept[1].position.step == 20
    assert len(stage.finished) == 2


def test_leaves_that_are_computed_twice_change_nothing(data: Path, undisturbed: str) -> None:
    stage = Stage(data, replay_every=3)
    stage.at(5, lambda: stage.dies(1)).at(7, lambda: stage.joins(rank=1))
    assert stage.plays(3).digest == undisturbed


@pytest.mark.parametrize("world_size", [1, 3])
def test_sums_that_lay_in_memory_that_is_gone_are_computed_again(
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


class Forgetful(Regression):
    """Keeps count of its calls, and lets that count."""

    calls = itertools.count()

    def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
        contribution = super().gradient(state, batch, random)
        noise = np.float32(next(self.calls) % 7)
        return Contribution({"weights": contribution.gradients["weights"] + noise}, 0.0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_program_that_contradicts_itself_is_refused(data: Path, world_size: int) -> None:
    with pytest.raises(InvalidProgram, match="came out differently when it was computed again"):
        Stage(data, program=Forgetful, replay_every=5).plays(world_size)


class Faulty(Regression):
    """Runs on a processor that is wrong in one place, for one of its ranks."""

    def gradient(self, state: State, batch: Batch, random: np.random.Generator) -> Contribution:
        contribution = super().gradient(state, batch, random)
        if threading.current_thread().name == "worker-1":
            contribution.gradients["weights"][0] *= np.float32(1 + 1e-6)
        return contribution


def test_a_rank_that_computes_wrongly_is_found_and_goes(data: Path, undisturbed: str) -> None:
    stage = Stage(data, program=Faulty, replay_every=1)
    stage.when_disputed = lambda workers: [stage.leaves(worker) for worker in workers]
    assert stage.plays(3).digest == undisturbed
    assert set(stage.disputes) == {(1,)}
