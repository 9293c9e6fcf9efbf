"""The messages of a rank that trains with others."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from muster.checkpoints.errors import CheckpointFailed
from muster.collectives.errors import ChannelClosed, CollectiveError, PeerUnreachable
from muster.contracts.messages.rank import (
    EpochDone,
    GroupMember,
    Heartbeat,
    PeerLost,
    RankMessage,
    Saved,
    Warned,
    WorkerGroup,
)
from muster.contracts.shards import Position
from muster.datasets.index import Totals
from muster.training.blocks import BusyFlag
from muster.training.groups.state_sync import Committed, Replica
from muster.training.reporter import EPOCHS_PER_MESSAGE, Reporter
from muster.training.schedule import Schedule
from muster.training.trainer import Outcome
from tests.support.ranks import Ear, settings_of

STATE = {"weights": np.arange(3, dtype=np.float32)}
MEMBER = GroupMember(worker_id=0, rank=0, host="", port=0)
GROUP = WorkerGroup(round=1, token="", members=(MEMBER,), paused=False)
BIGGEST = 2**64 - 1
SCHEDULE = Schedule(
    totals=Totals(lines=16, hash_sum=BIGGEST),
    batch_size=16,
    virtual_shards=8,
    epochs=100,
    seed=3,
    checkpoint_every=5,
)
EPOCHS = 2 * EPOCHS_PER_MESSAGE


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    ear.close()


def reporter_of(directory: Path, ear: Ear, **names: str) -> Reporter:
    settings = settings_of(directory, JOB_ID="job", MUSTER_AGENT_FD=ear.descriptor, **names)
    reporter = Reporter(settings, ear.voice, BusyFlag())
    reporter.set_schedule(STATE, SCHEDULE, b"values")
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


def epochs_in(messages: list[RankMessage]) -> list[int]:
    saved = [message for message in messages if isinstance(message, Saved)]
    return [epoch.epoch for message in saved for epoch in message.epochs]


@pytest.mark.parametrize("epochs", [0, 1, EPOCHS_PER_MESSAGE + 1])
def test_checkpoint_reports_every_epoch(tmp_path: Path, ear: Ear, epochs: int) -> None:
    reporter_of(tmp_path, ear).save_checkpoint(GROUP, replica_at(epochs + 3, epochs=epochs))
    messages = ear.received()
    assert epochs_in(messages) == list(range(epochs))
    assert {message.step for message in messages} == {epochs + 3}


def test_later_checkpoint_repeats_only_the_last_epochs(tmp_path: Path, ear: Ear) -> None:
    reporter = reporter_of(tmp_path, ear)
    reporter.save_checkpoint(GROUP, replica_at(EPOCHS, epochs=EPOCHS))
    ear.received()
    reporter.save_checkpoint(GROUP, replica_at(EPOCHS + 1, epochs=EPOCHS + 1))
    assert epochs_in(ear.received()) == list(range(EPOCHS + 1))[-EPOCHS_PER_MESSAGE:]


def test_restored_rank_reports_epochs_and_step_again(tmp_path: Path, ear: Ear) -> None:
    reporter_of(tmp_path, ear).save_checkpoint(GROUP, replica_at(EPOCHS, epochs=EPOCHS))
    ear.received()
    reporter, replica = reporter_of(tmp_path, ear), Replica(STATE)
    reporter.load_state(GROUP, replica)
    assert epochs_in(ear.received()) == list(range(EPOCHS))
    reporter.on_group_joined(GROUP, replica)
    ear.received()
    reporter.supervision.report()
    reporter.end(Outcome.DONE)
    (beat,) = ear.received()
    assert isinstance(beat, Heartbeat)
    assert beat.progress.step == EPOCHS, "also if it has nothing left to do"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ChannelClosed(1), "the connection to rank 2 is closed"),
        (PeerUnreachable(2, "host:1", "refused"), "rank 2 cannot be reached"),
    ],
)
def test_a_lost_peer_is_named_by_its_rank_in_the_job(
    tmp_path: Path, ear: Ear, error: CollectiveError, words: str
) -> None:
    members = tuple(replace(MEMBER, rank=rank) for rank in (0, 2, 3))
    reporter_of(tmp_path, ear).on_peer_lost(replace(GROUP, members=members), error)
    (lost,) = ear.received()
    assert isinstance(lost, PeerLost)
    assert lost.message.startswith(words)


def test_reported_numbers_stay_until_they_are_reported_again(tmp_path: Path, ear: Ear) -> None:
    reporter = reporter_of(tmp_path, ear)
    reporter.report(3, {"val_loss": np.float32(0.5), "accuracy": 1})
    reporter.report(4, {"val_loss": 0.25})
    reporter.supervision.report_exit()
    beats = [beat for beat in ear.received() if isinstance(beat, Heartbeat)]
    assert beats[-1].progress.metrics == {"val_loss": 0.25, "accuracy": 1.0}
    assert beats[-1].progress.metric_steps == {"val_loss": 4, "accuracy": 3}
    windows = [beat.window for beat in beats if beat.window is not None]
    assert {it.values["val_loss"].last for it in windows} == {0.5, 0.25}


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_improvement_is_the_best_until_a_better_one(tmp_path: Path, ear: Ear, mode: str) -> None:
    sign = -1 if mode == "max" else 1
    keeps = {"MUSTER_KEEP_BEST": f'{{"metric": "m", "mode": "{mode}"}}'}

    def begun() -> Reporter:
        reporter = reporter_of(tmp_path, ear, **keeps)
        reporter.on_group_joined(GROUP, replica_at(0))
        return reporter

    reporter, found = begun(), []
    values = [0.5, float("nan"), float("-inf"), 0.75, 0.25]
    for step, value in enumerate(values, start=1):
        reporter.report(step, {"m": sign * value})
        assert not reporter.is_best(replica_at(step - 1)), "of another step"
        found.append(reporter.is_best(replica_at(step)))
        reporter.save_checkpoint(GROUP, replica_at(step))
        assert not reporter.is_best(replica_at(step)), "it is saved"
    assert found == [True, False, False, False, True]
    successor = begun()
    successor.report(6, {"m": sign * 0.3})
    assert not successor.is_best(replica_at(6)), "another rank has saved a better one"


def test_a_metric_that_is_not_reported_is_a_warning(tmp_path: Path, ear: Ear) -> None:
    reporter = reporter_of(tmp_path, ear, MUSTER_KEEP_BEST='{"metric": "m"}')
    reporter.on_group_joined(GROUP, replica_at(0))
    reporter.report(1, {"loss_of_m": 0.5})
    for step in range(3):
        reporter.save_checkpoint(GROUP, replica_at(step, epochs=step))
    (warning,) = [it for it in ear.received() if isinstance(it, Warned)]
    assert "run.report() got loss_of_m on this rank, and no 'm'" in warning.message


def test_heartbeat_says_whether_the_rank_waits(tmp_path: Path, ear: Ear) -> None:
    reporter = reporter_of(tmp_path, ear)
    with reporter.busy:
        reporter.supervision.report()
    reporter.supervision.report_exit()
    assert [beat.waiting for beat in ear.received() if isinstance(beat, Heartbeat)] == [False, True]


def test_full_disk_is_reported_once_until_a_save_succeeds(tmp_path: Path, ear: Ear) -> None:
    reporter, full = reporter_of(tmp_path, ear), CheckpointFailed("no space is left")
    for step in (5, 10, 100, 100):
        reporter.on_checkpoint_failed(replica_at(step), full)
    goes_on, is_over = [each.message for each in ear.received() if isinstance(each, Warned)]
    assert "training goes on meanwhile: no space is left" in goes_on
    assert "the job is done when it succeeds: no space is left" in is_over
    reporter.save_checkpoint(GROUP, replica_at(100))
    reporter.on_checkpoint_failed(replica_at(100), full)
    assert sum(isinstance(each, Warned) for each in ear.received()) == 1


def test_a_job_begins_with_the_initial_arrays_and_values(tmp_path: Path, ear: Ear) -> None:
    replica = Replica(STATE)
    reporter_of(tmp_path, ear).load_state(GROUP, replica)
    assert replica.committed == Committed(position=Position(), values=b"values")
