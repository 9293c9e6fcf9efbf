"""One checkpoint for all ranks: written by one, read by any, fenced by the group's round."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from muster.checkpoints.comparison import differences, identity_of
from muster.checkpoints.errors import (
    CheckpointMismatch,
    OtherArithmetic,
    OtherData,
    StaleGeneration,
)
from muster.checkpoints.listing import refuse_other_schedule
from muster.contracts.messages.rank import EpochDone
from muster.contracts.settings.paths import checkpoints_of_job
from muster.contracts.shards import Position
from muster.datasets.index import Totals
from muster.runtime.fingerprint import Fingerprint
from muster.training.checkpointer import Checkpointer
from muster.training.groups.state_sync import Committed, Replica
from muster.training.schedule import Schedule
from tests.support.installation import newest_checkpoint
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


def replica_at(step: int, epochs: Sequence[EpochDone] = (EPOCH,)) -> Replica:
    replica = Replica(initial())
    committed = Committed(position=Position(step=step, consumed=step), epochs=tuple(epochs))
    replica.commit({"weights": np.full(4, step, np.float32)}, committed)
    return replica


def checkpointer(
    directory: Path, warn: Callable[[str], None] = lambda _: None, **names: object
) -> Checkpointer:
    names = {"JOB_ID": "job", "WORLD_SIZE": 4, **names}
    return Checkpointer(settings_of(directory, **names), warn)


def save(directory: Path, replica: Replica, generation: int = 1) -> Replica:
    writer = checkpointer(directory, RANK=generation % 4)
    writer.save(generation, 4, replica, SCHEDULE)
    writer.close()
    return replica


def restored(directory: Path, schedule: Schedule = SCHEDULE, **names: object) -> Replica | None:
    replica = Replica(initial())
    found = checkpointer(directory, **names).restore(initial(), replica, schedule)
    assert found is not replica.is_empty
    return replica if found else None


def test_job_without_checkpoints_restores_nothing(tmp_path: Path) -> None:
    assert restored(tmp_path) is None


@pytest.mark.parametrize("epochs", [0, 1, 5_000])
def test_any_rank_restores_state_and_epochs(tmp_path: Path, epochs: int) -> None:
    done = [
        EpochDone(epoch=n, samples=9, hash_sum=2**64 - 1, expected_samples=9, expected_hash_sum=n)
        for n in range(epochs)
    ]
    saved = save(tmp_path, replica_at(5, done))
    replica = restored(tmp_path, RANK=3)
    assert replica is not None
    assert replica.digest() == saved.digest()
    assert replica.committed == saved.committed


@pytest.mark.parametrize("stop", [{"is_stopped": True}, {"stop_requested": True}, {}])
def test_a_stop_is_restored_by_the_job_that_saved_it_alone(
    tmp_path: Path, stop: dict[str, bool]
) -> None:
    replica = replica_at(5)
    replica.commit(replica.state, structs.replace(replica.committed, **stop))
    save(tmp_path, replica)
    later = {"JOB_ID": "later", "MUSTER_JOB_UID": "another", "MUSTER_RESUME_FROM": "job"}
    for names, wanted in (({}, stop), (later, {})):
        found = restored(tmp_path, **names)
        assert found is not None
        assert found.committed == structs.replace(replica_at(5).committed, **wanted)


def seen_by(directory: Path, code: dict[str, str], uid: str = "uid") -> tuple[Any, list[str]]:
    """Return what a job that starts again finds beside its checkpoint, and its warnings."""
    warnings: list[str] = []
    names = {"MUSTER_JOB_UID": uid, "MUSTER_RESUME_FROM": "job"}  # the latter unless it has saved
    found = checkpointer(directory, warnings.append, **names)
    found.code = code
    replica = Replica(initial())
    assert found.restore(initial(), replica, SCHEDULE)
    witness = found.witness(replica)
    found.close()
    return witness and (witness.shard, witness.seen), warnings


def test_a_witness_is_for_the_same_job_state_and_code(tmp_path: Path) -> None:
    code = {"Muster": "1", "train.py": "a"}
    writer = checkpointer(tmp_path, MUSTER_JOB_UID="uid")
    writer.code = code
    for step in (5, 10):
        writer.save(1, 4, replica_at(step), SCHEDULE)
        writer.expect_witness(step, replica_at(step).digest())
        assert not writer.is_witness_expected(step + 1)
        if step == 5:
            writer.put_witness(1, "early")
    assert writer.is_witness_expected(10)
    assert seen_by(tmp_path, code)[0] is None, "there is none beside the newest checkpoint"
    writer.put_witness(3, {"loss": "1"})
    assert not writer.is_witness_expected(10)
    assert seen_by(tmp_path, code) == ((3, {"loss": "1"}), [])
    assert seen_by(tmp_path, code | {"late.py": "b"}) == ((3, {"loss": "1"}), [])
    for others in ({"train.py": "b"}, {"Muster": "2"}):
        found, warnings = seen_by(tmp_path, code | others)
        assert found is None
        assert warnings[0].endswith(f"compared with before: {min(others)} has changed")
    found, warnings = seen_by(tmp_path, code, uid="another")
    assert found is None
    assert "this job has left no witness.json" in warnings[0]


def test_a_state_that_is_saved_again_keeps_its_witness(tmp_path: Path) -> None:
    first = checkpointer(tmp_path, MUSTER_JOB_UID="uid")
    first.save(1, 4, replica_at(5), SCHEDULE)
    first.expect_witness(5, replica_at(5).digest())
    first.put_witness(0, "seen")
    second = checkpointer(tmp_path, MUSTER_JOB_UID="uid")
    assert second.witness(replica_at(5)) is not None
    second.save(2, 4, replica_at(5), SCHEDULE)
    second.expect_witness(5, replica_at(5).digest())
    assert seen_by(tmp_path, {}) == ((0, "seen"), [])


def test_older_group_cannot_save(tmp_path: Path) -> None:
    late = checkpointer(tmp_path, RANK=0)
    late.save(1, 2, replica_at(5), SCHEDULE)
    save(tmp_path, replica_at(10), generation=2)
    with pytest.raises(StaleGeneration):
        late.save(1, 2, replica_at(15), SCHEDULE)
    late.close()
    replica = restored(tmp_path)
    assert replica is not None
    assert replica.position.step == 10


def test_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, replica_at(5))
    replica = Replica(initial(3))
    with pytest.raises(CheckpointMismatch, match="another shape than the program begins with"):
        checkpointer(tmp_path).restore(initial(3), replica, SCHEDULE)
    assert replica.is_empty


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"batch_size": 8}, "made with batch_size 4, and this job has 8: the bits would differ"),
        ({"seed": 4}, "made with seed 3, and this job has 4: the bits would differ"),
        ({"virtual_shards": 4}, "virtual_shards 2, and this job has 4: the bits would differ"),
        ({"totals": Totals(lines=10, hash_sum=5)}, "lines 9, and this job has 10"),
        ({"totals": Totals(lines=9, hash_sum=0)}, "hash_sum 5, and this job has 0"),
    ],
)
def test_another_schedule_is_refused(tmp_path: Path, other: dict[str, Any], words: str) -> None:
    save(tmp_path, replica_at(5))
    with pytest.raises(CheckpointMismatch, match=words) as refused:
        restored(tmp_path, replace(SCHEDULE, **other))
    assert isinstance(refused.value, OtherData) is ("totals" in other)


INT8 = {"MUSTER_COMPRESSION": "int8", "MUSTER_MODE": "synchronous", "MUSTER_VIRTUAL_SHARDS": 8}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ({}, INT8, "compression none, and this job has int8"),
        (INT8, {}, "compression int8, and this job has none"),
        (INT8, INT8 | {"MUSTER_COMPRESSION": "random:0.1"}, "int8, and this job has random:0.1"),
        (INT8, INT8 | {"MUSTER_COMPRESSION_GROUPS": 4}, "compression_groups 8, and this job has 4"),
        (INT8, INT8 | {"MUSTER_COMPRESSION_GROUPS": 8}, ""),
    ],
)
def test_another_compression_is_refused(
    tmp_path: Path, before: dict[str, object], after: dict[str, object], words: str
) -> None:
    writer = checkpointer(tmp_path, **before)
    writer.save(1, 4, replica_at(5), SCHEDULE)
    writer.close()
    if not words:
        assert restored(tmp_path, **after) is not None
        return
    with pytest.raises(CheckpointMismatch, match=words):
        restored(tmp_path, **after)


@pytest.mark.parametrize("other", [{"epochs": 7}, {"checkpoint_every": 1}])
def test_other_settings_may_change(tmp_path: Path, other: dict[str, Any]) -> None:
    save(tmp_path, replica_at(5))
    assert restored(tmp_path, replace(SCHEDULE, **other)) is not None


OWN = {"JOB_ID": "job", "MUSTER_JOB_UID": "uid"}
LATER = {"JOB_ID": "later", "MUSTER_JOB_UID": "another", "MUSTER_RESUME_FROM": "job"}
FIRST, SECOND = (
    Fingerprint(digest=it, arithmetic=it, facts={"numpy": it}) for it in ("1.26", "2.0")
)
DIFFERENT = "the checkpoint of step 5 has other bits: .*numpy is 2.0 here and 1.26 there"


def resume(
    directory: Path, made_by: Fingerprint | None, by: Fingerprint | None, **names: object
) -> str:
    """Save with one arithmetic and restore with another; return the warnings."""
    warnings: list[str] = []
    saver = checkpointer(directory, **OWN)
    saver.arithmetic = made_by
    saver.save(1, 4, replica_at(5), SCHEDULE)
    saver.close()
    restorer, replica = checkpointer(directory, warnings.append, **names), Replica(initial())
    restorer.arithmetic = by
    assert restorer.restore(initial(), replica, SCHEDULE)
    assert replica.digest() == replica_at(5).digest()
    return "".join(warnings)


def test_other_arithmetic_than_that_of_the_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OtherArithmetic, match=f"{DIFFERENT}.*resume_from: job"):
        resume(tmp_path, FIRST, SECOND, **OWN)


@pytest.mark.parametrize("names", [LATER, {"JOB_ID": "job"}], ids=["another job", "by hand"])
def test_a_person_may_go_on_with_other_arithmetic(tmp_path: Path, names: dict[str, str]) -> None:
    assert re.match(DIFFERENT, resume(tmp_path, FIRST, SECOND, **names))


@pytest.mark.parametrize(
    ("made_by", "by"), [(FIRST, FIRST), (None, SECOND), (FIRST, None)], ids=["same", "old", "any"]
)
def test_the_same_or_unknown_arithmetic_goes_on(
    tmp_path: Path, made_by: Fingerprint | None, by: Fingerprint | None
) -> None:
    assert not resume(tmp_path, made_by, by, **OWN)


def test_arithmetic_is_no_part_of_the_identity(tmp_path: Path) -> None:
    found = []
    for number, arithmetic in enumerate((FIRST, SECOND, None)):
        directory = tmp_path / str(number)
        resume(directory, arithmetic, arithmetic, **OWN)
        found.append(
            newest_checkpoint(checkpoints_of_job(directory / "checkpoints", "job"), 0, None)
        )
    assert len({identity_of(it) for it in found}) == 1
    assert not differences(found[0].state, found[2].state)


def test_checkpoint_without_virtual_shards_matches_any() -> None:
    older = {"muster.course": {"batch_size": 4, "seed": 3}}
    refuse_other_schedule(older, {"batch_size": 4, "seed": 3, "virtual_shards": 8}, "here")


def test_another_job_restores_only_with_resume_from(tmp_path: Path) -> None:
    save(tmp_path, replica_at(5))
    assert restored(tmp_path, JOB_ID="other") is None
    assert restored(tmp_path, JOB_ID="other", MUSTER_RESUME_FROM="job") is not None


def test_another_job_restores_the_checkpoint_of_a_step(tmp_path: Path) -> None:
    writer = checkpointer(tmp_path, RANK=0)
    for step in (5, 6, 7):
        writer.save(1, 4, replica_at(step), SCHEDULE, best=0.5 if step == 6 else None)
    writer.close()
    for text, step in (("job", 7), ("job:5", 5), ("job:best", 6)):
        found = restored(tmp_path, JOB_ID="other", MUSTER_RESUME_FROM=text)
        assert found is not None
        assert found.position.step == step
    with pytest.raises(CheckpointMismatch, match="no checkpoint of step 4 any more"):
        restored(tmp_path, JOB_ID="other", MUSTER_RESUME_FROM="job:4")
