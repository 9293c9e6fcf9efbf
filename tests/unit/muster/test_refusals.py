from pathlib import Path

import pytest

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointMismatch,
    CheckpointNotWritable,
    StaleGeneration,
    UnsupportedState,
)
from muster.contracts.encoding import encode
from muster.contracts.errors import MusterError
from muster.contracts.job import Reason
from muster.contracts.messages import Refused
from muster.datasets.errors import (
    DatasetEmpty,
    DatasetMissing,
    InvalidSample,
    ShardChanged,
    ShardUnreadable,
)
from muster.redaction import Redaction
from muster.refusals import MESSAGE_LIMIT, refusal_of

HERE = Path("/data")
SHARD = HERE / "shard_00000.txt"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DatasetMissing(HERE, "does not exist"), Reason.INVALID_DATASET),
        (DatasetEmpty(HERE, "holds no shard"), Reason.INVALID_DATASET),
        (ShardUnreadable(SHARD, OSError(13, "denied")), Reason.INVALID_DATASET),
        (ShardChanged(SHARD, "has 1 lines"), Reason.INVALID_DATASET),
        (InvalidSample(SHARD, 3, "no sample", b"x"), Reason.INVALID_DATASET),
        (CheckpointDamaged("damaged"), Reason.INVALID_CHECKPOINT),
        (CheckpointMismatch("of another rank"), Reason.INVALID_CHECKPOINT),
        (CheckpointNotWritable("read only"), Reason.INVALID_CHECKPOINT),
        (UnsupportedState("holds a lambda"), Reason.INVALID_PROGRAM),
    ],
)
def test_what_a_restart_would_only_meet_again_is_refused(
    error: MusterError, reason: Reason
) -> None:
    assert refusal_of(error, Redaction()) == Refused(reason=reason, message=str(error))


@pytest.mark.parametrize(
    "error",
    [
        CheckpointFailed("the disk is full"),
        StaleGeneration("/checkpoints", 1, 2),
        MusterError("anything else"),
    ],
)
def test_what_may_pass_is_tried_again(error: MusterError) -> None:
    assert refusal_of(error, Redaction()) is None


def test_a_reason_without_end_is_cut_so_that_it_is_heard() -> None:
    refused = refusal_of(DatasetEmpty(HERE, "\N{SNOWMAN}" * 100_000), Redaction())
    assert refused is not None
    assert len(encode(refused)) < 1 << 16


def test_a_secret_is_taken_out_before_a_reason_is_cut_in_the_middle_of_it() -> None:
    value = "correct horse battery staple"
    whole = str(DatasetEmpty(HERE, ""))
    error = DatasetEmpty(HERE, "x" * (MESSAGE_LIMIT - len(whole) - 15) + value)
    refused = refusal_of(error, Redaction([value]))
    assert refused is not None
    assert "correct" in str(error)[:MESSAGE_LIMIT], "it would be cut in the middle of it"
    assert "correct" not in refused.message
