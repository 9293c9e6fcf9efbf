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


def test_full_disk_delays_only_the_last_checkpoint(data: Path, undisturbed: str) -> None:
    stage = Stage(data)
    stage.full_at = [4, 20, 20]
    assert stage.plays(2).digest == undisturbed
    assert stage.unkept == [4, 20, 20]
    assert stage.kept is not None
    assert stage.kept[1].position.step == 20
    assert len(stage.finished) == 2


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
