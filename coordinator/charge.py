"""One job in a supervisor's care: what is known of it, and what of that is not durable yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator import happenings
from coordinator.actions import Action
from coordinator.chronicle import narrate
from coordinator.fold import fold
from coordinator.happenings import Happening
from coordinator.launcher import AgentProcess
from coordinator.preparation import Places
from coordinator.rows import Attachment, Moment, change_of, is_urgent, workers_of
from coordinator.snapshot import JobSnapshot
from muster.contracts.job import TERMINAL, JobStatus
from store.records import Event, JobChange, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What is to be committed for one job."""

    change: JobChange
    workers: dict[int, Worker]
    changed: list[Worker]
    events: tuple[Event, ...]
    is_urgent: bool
    """It holds more than news of progress, so it cannot wait for the next tick."""


@dataclass(slots=True, kw_only=True)
class Charge:
    """The supervisor's mutable record of one job."""

    snapshot: JobSnapshot
    attachment: Attachment
    places: Places | None = None
    """Known once the job was prepared, before its first rank is started."""
    token: str = ""
    """Of the agent of the present generation."""
    master_port: int = 0
    agent: AgentProcess | None = None
    decided: list[Action] = field(default_factory=list)
    """Taken into the snapshot, but not performed before they are durable."""
    events: list[Event] = field(default_factory=list)
    """Told, and not committed yet."""
    committed_change: JobChange | None = None
    committed_workers: dict[int, Worker] = field(default_factory=dict)

    def learn(self, happening: Happening, now: Moment) -> None:
        """Fold a happening in, and note what is worth telling."""
        before = self.snapshot
        self.snapshot = fold(before, happening, now.monotonic)
        entry = narrate(before, happening, self.snapshot)
        if entry is not None:
            self.events.append(
                Event(
                    at=now.wall,
                    kind=entry.kind,
                    message=entry.message,
                    rank=entry.rank,
                    incarnation=entry.incarnation,
                )
            )
        if self.attachment.started_at is None and self.snapshot.status is JobStatus.STARTING:
            self.attachment = replace(self.attachment, started_at=now.wall)

    def decide(self, actions: Sequence[Action], now: Moment) -> None:
        """Take the actions of a plan; they are performed once that is durable."""
        for action in actions:
            self.learn(happenings.Taken(action=action), now)
            self.decided.append(action)

    def unwritten(self, now: Moment) -> "Draft":
        """Return everything that differs from the rows."""
        workers = {worker.rank: worker for worker in workers_of(self.snapshot, now)}
        return Draft(
            change=change_of(self.snapshot, self.attachment, now),
            workers=workers,
            changed=[w for w in workers.values() if self.committed_workers.get(w.rank) != w],
            events=tuple(self.events),
            is_urgent=self._is_urgent(workers),
        )

    def differs(self, draft: "Draft") -> bool:
        """Whether a draft holds anything that is not in the rows."""
        return bool(draft.changed or draft.events or draft.change != self.committed_change)

    def written(self, draft: "Draft") -> None:
        """Remember that a draft is in the rows."""
        self.committed_change = draft.change
        self.committed_workers = draft.workers
        del self.events[: len(draft.events)]

    def _is_urgent(self, workers: Mapping[int, Worker]) -> bool:
        return bool(self.decided or self.events) or any(
            is_urgent(self.committed_workers.get(rank), worker) for rank, worker in workers.items()
        )

    @property
    def is_admitted(self) -> bool:
        """Whether it has left the queue and is not over: its ranks hold slots."""
        return self.snapshot.status not in TERMINAL | {JobStatus.QUEUED}

    @property
    def is_over(self) -> bool:
        return self.snapshot.status in TERMINAL
