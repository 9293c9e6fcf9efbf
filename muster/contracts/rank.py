"""One rank: its progress, and its process (identity and states) as the coordinator sees it.

A *rank* is a place in the job; an *attempt* is one process that fills it. The attempts of a rank
count up from 0 and are never reused, so a message, a log file and a checkpoint's generation say
which process they come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from math import isfinite
from typing import Annotated, Final, TypeAlias

import msgspec

COUNT_MAX: Final = 2**63 - 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
"""A counter of a rank, limited to what every database can hold: a program may send any number."""


class RankProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank reports of its training, declared here only.

    Heartbeat, snapshot and row embed it; the REST view of a rank inherits it. A field that is added
    later needs a default: rows and ranks of the release before lack it. Numbers that are not finite
    become None, and such metrics are left out: JSON has no NaN.
    """

    step: Count  # steps done; each counts for the samples of one batch
    total_steps: Count | None  # steps to do in all; None while unknown
    epoch: Count  # of the last step, counted from 0
    shard_idx: Count  # position in the data: index of the shard, and lines of it that are consumed
    line_idx: Count
    loss: float | None  # the last one that the program gave
    metrics: Annotated[
        dict[str, float], msgspec.Meta(description="Other numbers that the program reported.")
    ]
    last_checkpoint_step: Count | None  # of the newest durable checkpoint, saved or restored
    last_checkpoint_bytes: Annotated[
        Count | None, msgspec.Meta(description="Of its arrays, if this job has saved it.")
    ] = None
    last_checkpoint_at: Annotated[
        Annotated[datetime, msgspec.Meta(tz=True)] | None,
        msgspec.Meta(description="When that was durable, by the clock of the rank's host."),
    ] = None
    metric_steps: dict[str, Count] = {}  # synchronous mode: after which step each was reported
    is_unchecked: Annotated[
        bool, msgspec.Meta(description="Its script gave `check=False` to `muster.torch.join`.")
    ] = False

    def __post_init__(self) -> None:
        if self.loss is not None and not isfinite(self.loss):
            msgspec.structs.force_setattr(self, "loss", None)
        if not all(map(isfinite, self.metrics.values())):
            finite = {name: value for name, value in self.metrics.items() if isfinite(value)}
            msgspec.structs.force_setattr(self, "metrics", finite)


NO_PROGRESS: Final = RankProgress(
    step=0,
    total_steps=None,
    epoch=0,
    shard_idx=0,
    line_idx=0,
    loss=None,
    metrics={},
    last_checkpoint_step=None,
)


class Phase(StrEnum):
    """How far a process is, as it reports itself."""

    TRAINING = "training"
    EXITING = "exiting"  # its exit handlers run; it may have failed, or have work left
    FINISHED = "finished"
    """They run after the end of its loop: all is durable, without an error or SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """The identity of a process. A pid is reused; together with the other fields it is not."""

    pid: int
    start_ticks: int  # Field 22 of /proc/PID/stat: clock ticks between boot and its start
    boot_id: str
    node: str  # the host's name, for people: two may share it
    pid_namespace: int  # the inode of the namespace (container) in which the pid counts


class ProcessState(StrEnum):
    """What the coordinator knows of the process."""

    SPAWNED = "spawned"  # it was started and has sent nothing yet; the start-up grace period runs
    LIVE = "live"  # it sends heartbeats, or it is a program that sends none and its process exists
    SUSPECT = "suspect"
    """A heartbeat is overdue, but the timeout has not passed; a heartbeat makes it live again."""
    EXITING = "exiting"
    """It runs its exit handlers and the interpreter's end, in which silence means nothing."""
    EXITED = "exited"  # its parent has reaped it; the exit code or signal is recorded


TRANSITIONS: Final[Mapping[ProcessState, frozenset[ProcessState]]] = {
    ProcessState.SPAWNED: frozenset({ProcessState.LIVE, ProcessState.EXITED}),
    ProcessState.LIVE: frozenset({ProcessState.SUSPECT, ProcessState.EXITING, ProcessState.EXITED}),
    ProcessState.SUSPECT: frozenset({ProcessState.LIVE, ProcessState.EXITING, ProcessState.EXITED}),
    # Back to LIVE: the process that joined has ended, and the script that started it goes on.
    ProcessState.EXITING: frozenset({ProcessState.LIVE, ProcessState.EXITED}),
    ProcessState.EXITED: frozenset(),
}
