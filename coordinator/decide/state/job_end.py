"""How a job comes to its end: the kinds of end, the moves between them, and the time that is left.

Pure. Times are seconds on the coordinator's monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from coordinator.decide.state.rank import NEVER, Cause
from muster.contracts.job.status import Reason, StopRequest
from muster.contracts.messages.agent import RankExited


class EndKind(Enum):
    """Why no new process may be started; in the first two one may be."""

    NONE = auto()  # the job goes on
    AFTER_LOOP = auto()
    """Training is over and durable; the job goes on until the script of one rank has ended."""
    DONE = auto()
    """The last checkpoint of a synchronous job is durable; its ranks only have to exit."""
    INTERRUPTED = auto()
    """The service shuts down: ranks save and exit, the job goes back to the queue."""
    STOPPED = auto()  # a user has asked for it
    FAILED = auto()  # it cannot go on


_ENDS: Final = frozenset({EndKind.DONE, EndKind.INTERRUPTED, EndKind.STOPPED, EndKind.FAILED})

TRANSITIONS: Final[Mapping[EndKind, frozenset[EndKind]]] = {
    EndKind.NONE: _ENDS | {EndKind.AFTER_LOOP},
    EndKind.AFTER_LOOP: _ENDS,
    # It is complete, whatever comes now.
    EndKind.DONE: frozenset(),
    EndKind.INTERRUPTED: frozenset({EndKind.NONE, EndKind.STOPPED, EndKind.FAILED}),
    EndKind.STOPPED: frozenset({EndKind.FAILED}),
    EndKind.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailure(Cause):
    """Why a job cannot go on; its ranks save and exit, then its status is FAILED."""

    exit_code: int = 1  # of a `muster run`; never 0
    blamed: RankExited | None = None  # of a gang, until a rank that failed before it is found
    limit: str = ""  # a verb phrase: why it was not started again


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """The end of a job, with the facts that each kind needs."""

    kind: EndKind = EndKind.NONE
    since: float = NEVER  # when this coordinator learned of it
    ends_at: float = NEVER  # when ranks that still run are killed
    stop: StopRequest | None = None  # what a user has asked of the job, which may be ending already
    failure: JobFailure | None = None  # the first one
    interruption: str = ""  # why, unless the service is shut down
    exporter: int | None = None
    """After the loop, the rank that exports the model: on its script the job waits."""

    @property
    def reason(self) -> Reason | None:
        """Why all ranks are ended; None for a job that goes on, or is done."""
        if self.failure is not None:
            return self.failure.reason
        if self.stop is not None:
            return Reason.STOPPED_BY_USER
        return Reason.INTERRUPTED if self.kind is EndKind.INTERRUPTED else None

    @property
    def is_going(self) -> bool:
        """True if processes may be started."""
        return self.kind in {EndKind.NONE, EndKind.AFTER_LOOP}

    @property
    def is_forced(self) -> bool:
        """True if ranks are killed without time to save."""
        return self.stop is StopRequest.FORCED

    def move(self, target: EndKind, now: float, grace_seconds: float) -> "JobEnd":
        """Return the end of another kind, or this one if the table does not allow the move.

        A grace period that runs already is kept.
        """
        if target not in TRANSITIONS[self.kind]:
            return self
        if target is EndKind.NONE:
            return GOING if self.exporter is None else GOING.end_loop(self.exporter)
        if self.is_going:
            return replace(self, kind=target, since=now, ends_at=now + grace_seconds)
        return replace(self, kind=target)

    def end_loop(self, exporter: int) -> "JobEnd":
        """Return the end of a job whose training is over; the first rank that was named stays."""
        if self.exporter is not None:
            return self
        kind = EndKind.AFTER_LOOP if self.kind is EndKind.NONE else self.kind
        return replace(self, kind=kind, exporter=exporter)

    def fail(self, failure: JobFailure, now: float, grace_seconds: float) -> "JobEnd":
        """Return the end of a job that cannot go on; the first failure stands."""
        moved = self.move(EndKind.FAILED, now, grace_seconds)
        return self if moved is self else replace(moved, failure=failure)

    def request(self, stop: StopRequest, now: float, grace_seconds: float) -> "JobEnd":
        """Return the end after a request of a user: it may leave less time, never more."""
        if self.stop in {stop, StopRequest.FORCED}:
            return self
        asked = replace(self.move(EndKind.STOPPED, now, grace_seconds), stop=stop)
        if now + grace_seconds < asked.ends_at:
            return replace(asked, since=now, ends_at=now + grace_seconds)
        return asked


GOING: Final = JobEnd()
"""Of a job that does not end."""
