"""Which errors a restart would only meet again, and what to call them to the coordinator."""

from collections.abc import Mapping
from typing import Final

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointNotWritable,
    UnsupportedState,
)
from muster.contracts.encoding import speakable
from muster.contracts.errors import MusterError
from muster.contracts.job import Reason
from muster.contracts.messages import Raised, Refused
from muster.datasets.errors import (
    DatasetEmpty,
    DatasetMissing,
    InvalidSample,
    ShardChanged,
    ShardUnreadable,
)
from muster.program import InvalidProgram, ProgramRaised
from muster.redaction import Redaction

_REASONS: Final[Mapping[type[MusterError], Reason]] = {
    DatasetMissing: Reason.INVALID_DATASET,
    DatasetEmpty: Reason.INVALID_DATASET,
    ShardUnreadable: Reason.INVALID_DATASET,
    ShardChanged: Reason.INVALID_DATASET,
    InvalidSample: Reason.INVALID_DATASET,
    CheckpointDamaged: Reason.INVALID_CHECKPOINT,
    CheckpointMismatch: Reason.INVALID_CHECKPOINT,
    CheckpointNotWritable: Reason.INVALID_CHECKPOINT,
    UnsupportedState: Reason.INVALID_PROGRAM,
    InvalidProgram: Reason.INVALID_PROGRAM,
}

MESSAGE_LIMIT: Final = 8192
"""Characters of a reason: a longer message would not fit into the channel, and not be heard."""


def refusal_of(error: MusterError, redaction: Redaction) -> Refused | Raised | None:
    """Return what to tell the agent, or None if starting again may help.

    What a program raised may help once: that it comes again is for the coordinator to see.
    """
    # Cut last: in half of a secret nobody would recognize it.
    sentence = speakable(redaction.without(str(error))[:MESSAGE_LIMIT])
    if isinstance(error, ProgramRaised):
        return Raised(step=error.step, message=sentence)
    reason = _REASONS.get(type(error))
    return None if reason is None else Refused(reason=reason, message=sentence)
