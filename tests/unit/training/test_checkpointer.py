"""One checkpoint for all ranks: written by one, read by any, fenced by the layout."""

from pathlib import Path

import numpy as np
import pytest

from muster.checkpoints.errors import CheckpointError, CheckpointMismatch
from muster.contracts.messages import EpochDone
from muster.contracts.shards import Position
from muster.datasets.index import Totals
from muster.training.checkpointer import Checkpointer
from muster.training.schedule import Schedule
from muster.training.state_sync import Committed, Replica
from tests.support.ranks import settings_of

SCHEDULE = Schedule(
    totals=Totals(lines=9, hash_sum=5),
    batch_size=4,
    virtual_shards=2,
    epochs=2,
    seed=3,
    checkpoint_every=5,
)
EPOCH = EpochDone(epoch=0, samples=9, hash_sum=5, expected_samples=9, expected_hash_sum=5)


def initial(size: int = 4) -> dict[str, np.ndarray]:
    return {"weights": np.zeros(size, np.float32)}


def replica_at(step: int) -> Replica:
    replica = Replica(initial())
    committed = Committed(position=Position(step=step, consumed=step), epochs=(EPOCH,))
    replica.commit({"weights": np.full(4, step, np.float32)}, committed)
    return replica


def keeper(directory: Path, **names: object) -> Checkpointer:
    return Checkpointer(
        settings_of(directory, **{"JOB_ID": "job", "WORLD_SIZE": 4, **names}), lambda _: None
    )


def test_a_job_that_has_saved_nothing_begins_by_itself(tmp_path: Path) -> None:
    replica = Replica(initial())
    assert not keeper(tmp_path).restore(initial(), replica, SCHEDULE)
    assert replica.is_empty


def test_whoever_is_the_first_of_the_next_group_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    kept = replica_at(5)
    writer = keeper(tmp_path, RANK=0)
    writer.save(1, 4, kept, SCHEDULE)
    writer.close()
    replica = Replica(initial())
    assert keeper(tmp_path, RANK=3).restore(initial(), replica, SCHEDULE)
    assert replica.digest() == kept.digest()
    assert replica.committed == kept.committed


def test_what_every_pass_has_consumed_is_kept_however_many_there_are(tmp_path: Path) -> None:
    biggest = 2**64 - 1
    passes = tuple(
        EpochDone(epoch=n, samples=9, hash_sum=biggest, expected_samples=9, expected_hash_sum=n)
        for n in range(5_000)
    )
    kept, replica = replica_at(5), Replica(initial())
    kept.commit(kept.state, Committed(position=kept.position, epochs=passes))
    writer = keeper(tmp_path)
    writer.save(1, 1, kept, SCHEDULE)
    writer.close()
    assert keeper(tmp_path).restore(initial(), replica, SCHEDULE)
    assert replica.committed.epochs == passes


def test_before_the_first_pass_is_over_there_is_nothing_to_keep_of_any(tmp_path: Path) -> None:
    kept, replica = replica_at(5), Replica(initial())
    kept.commit(kept.state, Committed(position=kept.position))
    writer = keeper(tmp_path)
    writer.save(1, 1, kept, SCHEDULE)
    writer.close()
    assert keeper(tmp_path).restore(initial(), replica, SCHEDULE)
    assert replica.committed == kept.committed


def test_the_latest_step_counts_whoever_wrote_it(tmp_path: Path) -> None:
    first, second = keeper(tmp_path, RANK=0), keeper(tmp_path, RANK=1)
    first.save(1, 2, replica_at(5), SCHEDULE)
    second.save(2, 1, replica_at(10), SCHEDULE)
    first.close()
    second.close()
    replica = Replica(initial())
    assert keeper(tmp_path).restore(initial(), replica, SCHEDULE)
    assert replica.position.step == 10


def test_who_still_writes_for_an_older_layout_is_refused(tmp_path: Path) -> None:
    late, present = keeper(tmp_path, RANK=0), keeper(tmp_path, RANK=1)
    late.save(1, 2, replica_at(5), SCHEDULE)
    present.save(2, 1, replica_at(10), SCHEDULE)
    with pytest.raises(CheckpointError):
        late.save(1, 2, replica_at(15), SCHEDULE)
    replica = Replica(initial())
    keeper(tmp_path).restore(initial(), replica, SCHEDULE)
    assert replica.position.step == 10
    late.close()
    present.close()


def test_a_state_of_another_shape_is_refused_and_nothing_has_moved(tmp_path: Path) -> None:
    writer = keeper(tmp_path)
    writer.save(1, 1, replica_at(5), SCHEDULE)
    writer.close()
    replica = Replica(initial(3))
    with pytest.raises(CheckpointMismatch, match="another shape than the program begins with"):
        keeper(tmp_path).restore(initial(3), replica, SCHEDULE)
    assert replica.is_empty


def test_another_job_can_go_on_from_it_when_it_is_told_to(tmp_path: Path) -> None:
    writer = keeper(tmp_path)
    writer.save(1, 1, replica_at(5), SCHEDULE)
    writer.close()
    replica = Replica(initial())
    assert not keeper(tmp_path, JOB_ID="other").restore(initial(), replica, SCHEDULE)
    assert keeper(tmp_path, JOB_ID="other", MUSTER_RESUME_FROM="job").restore(
        initial(), replica, SCHEDULE
    )
    assert replica.position.step == 5
