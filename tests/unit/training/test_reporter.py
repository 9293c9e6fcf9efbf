"""What the coordinator hears of a rank that trains with others."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from muster.checkpoints.errors import CheckpointFailed, CheckpointMismatch
from muster.contracts.messages import (
    EpochDone,
    GroupMember,
    Heartbeat,
    RankMessage,
    Saved,
    Warned,
    WorkerGroup,
)
from muster.contracts.shards import Position
from muster.datasets.index import Totals
from muster.training.reporter import EPOCHS_PER_MESSAGE, Reporter
from muster.training.schedule import Schedule
from muster.training.state_sync import Committed, Replica
from muster.training.trainer import Outcome
from tests.support.ranks import Ear, settings_of

STATE = {"weights": np.arange(3, dtype=np.float32)}

SEAT = GroupMember(worker_id=0, rank=0, host="", port=0)
LAYOUT = WorkerGroup(generation=1, token="", members=(SEAT,), paused=False)

BIGGEST = 2**64 - 1


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()


SCHEDULE = Schedule(
    totals=Totals(lines=16, hash_sum=BIGGEST),
    batch_size=16,
    virtual_shards=8,
    epochs=100,
    seed=3,
    checkpoint_every=5,
)


def reporter_of(directory: Path, ear: Ear, schedule: Schedule = SCHEDULE) -> Reporter:
    settings = settings_of(directory, JOB_ID="job", MUSTER_AGENT_FD=ear.descriptor)
    reporter = Reporter(settings, ear.voice)
    reporter.set_schedule(STATE, schedule)
    return reporter


def replica_at(step: int, epochs: int = 0) -> Replica:
    """Return a replica of one step an epoch, whose numbers are as long as they can be."""
    done = tuple(
        EpochDone(
            epoch=epoch,
            samples=2**63 - 1,
            hash_sum=BIGGEST,
            expected_samples=2**63 - 1,
            expected_hash_sum=BIGGEST,
        )
        for epoch in range(epochs)
    )
    replica = Replica(STATE)
    replica.commit(STATE, Committed(position=Position(step=step), epochs=done))
    return replica


def epochs_told(messages: list[RankMessage]) -> list[int]:
    saved = [message for message in messages if isinstance(message, Saved)]
    return [epoch.epoch for message in saved for epoch in message.epochs]


def test_every_pass_is_told_however_many_there_are(tmp_path: Path, ear: Ear) -> None:
    passes = EPOCHS_PER_MESSAGE + 1
    reporter_of(tmp_path, ear).save_checkpoint(LAYOUT, replica_at(passes, epochs=passes))
    assert epochs_told(ear.heard()) == list(range(passes))


def test_who_goes_on_from_a_checkpoint_tells_every_pass_behind_it(tmp_path: Path, ear: Ear) -> None:
    passes = 2 * EPOCHS_PER_MESSAGE
    reporter_of(tmp_path, ear).save_checkpoint(LAYOUT, replica_at(passes, epochs=passes))
    ear.heard()
    reporter_of(tmp_path, ear).load_state(LAYOUT, Replica(STATE))
    assert epochs_told(ear.heard()) == list(range(passes))


def test_a_later_checkpoint_tells_the_last_passes_again_and_not_all(
    tmp_path: Path, ear: Ear
) -> None:
    passes = 2 * EPOCHS_PER_MESSAGE
    reporter = reporter_of(tmp_path, ear)
    reporter.save_checkpoint(LAYOUT, replica_at(passes, epochs=passes))
    ear.heard()
    reporter.save_checkpoint(LAYOUT, replica_at(passes + 1, epochs=passes + 1))
    assert epochs_told(ear.heard()) == list(range(passes + 1))[-EPOCHS_PER_MESSAGE:]


def test_a_checkpoint_before_the_first_pass_is_over_is_told(tmp_path: Path, ear: Ear) -> None:
    reporter_of(tmp_path, ear).save_checkpoint(LAYOUT, replica_at(3))
    (saved,) = ear.heard()
    assert isinstance(saved, Saved)
    assert (saved.step, saved.epochs) == (3, ())


def test_who_goes_on_from_the_last_step_and_has_nothing_to_do_says_where_it_stands(
    tmp_path: Path, ear: Ear
) -> None:
    reporter_of(tmp_path, ear).save_checkpoint(LAYOUT, replica_at(100))
    reporter, replica = reporter_of(tmp_path, ear), Replica(STATE)
    reporter.load_state(LAYOUT, replica)
    reporter.on_group_joined(LAYOUT, replica)
    ear.heard()
    reporter.supervision.report()
    reporter.print_outcome(Outcome.DONE)
    (beat,) = ear.heard()
    assert isinstance(beat, Heartbeat)
    assert beat.step == 100


def test_a_beat_tells_who_waits_from_who_is_at_work(tmp_path: Path, ear: Ear) -> None:
    reporter = reporter_of(tmp_path, ear)
    with reporter.busy:
        reporter.supervision.report()
    reporter.supervision.stop()
    assert [beat.waiting for beat in ear.heard() if isinstance(beat, Heartbeat)] == [False, True]


def test_a_disk_that_is_full_is_told_of_once_until_it_is_not(tmp_path: Path, ear: Ear) -> None:
    reporter, full = reporter_of(tmp_path, ear), CheckpointFailed("no space is left")
    for step in (5, 10, 100, 100):
        reporter.on_checkpoint_failed(replica_at(step), full)
    goes_on, is_over = [said.message for said in ear.heard() if isinstance(said, Warned)]
    assert "training goes on meanwhile: no space is left" in goes_on
    assert "the job is done when it succeeds: no space is left" in is_over
    reporter.save_checkpoint(LAYOUT, replica_at(100))
    reporter.on_checkpoint_failed(replica_at(100), full)
    assert sum(isinstance(said, Warned) for said in ear.heard()) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"batch_size": 8},
        {"seed": 4},
        {"totals": Totals(lines=17, hash_sum=BIGGEST)},
        {"totals": Totals(lines=16, hash_sum=0)},
    ],
)
def test_a_checkpoint_made_on_another_way_through_the_data_is_refused(
    tmp_path: Path, ear: Ear, other: dict[str, Any]
) -> None:
    reporter_of(tmp_path, ear).save_checkpoint(LAYOUT, replica_at(3))
    replica = Replica(STATE)
    with pytest.raises(CheckpointMismatch, match="another batch size, seed or data set"):
        reporter_of(tmp_path, ear, replace(SCHEDULE, **other)).load_state(LAYOUT, replica)
    assert replica.is_empty


@pytest.mark.parametrize("other", [{"virtual_shards": 4}, {"epochs": 7}, {"checkpoint_every": 1}])
def test_a_checkpoint_is_good_for_more_passes_and_other_virtual_shards(
    tmp_path: Path, ear: Ear, other: dict[str, Any]
) -> None:
    reporter_of(tmp_path, ear).save_checkpoint(LAYOUT, replica_at(3))
    replica = Replica(STATE)
    reporter_of(tmp_path, ear, replace(SCHEDULE, **other)).load_state(LAYOUT, replica)
    assert replica.position.step == 3
