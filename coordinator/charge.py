"""One job in a supervisor's care: what is known of it, and what of that is not durable yet."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from coordinator import happenings
from coordinator.actions import Action, Start, StartAgent
from coordinator.chronicle import narrate
from coordinator.fold import fold
from coordinator.happenings import Happening
from coordinator.incarnation_rows import incarnations_of
from coordinator.launcher import AgentProcess
from coordinator.moment import Moment
from coordinator.plan import plan, wake_at
from coordinator.pool_rows import commit_of, epochs_of, members_of
from coordinator.preparation import Places
from coordinator.rows import Attachment, Haste, change_of, haste, workers_of
from coordinator.snapshot import NEVER, JobSnapshot
from muster.contracts.job import TERMINAL, JobStatus
from muster.contracts.messages import RankSaid, Saved
from muster.contracts.process import ProcessRecord
from store.records import (
    Commit,
    EpochRecord,
    Event,
    Incarnation,
    JobChange,
    JobWrite,
    Member,
    Worker,
)

_NO_TIME: Final = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What is to be committed for one job."""

    change: JobChange
    workers: dict[int, Worker]
    changed: list[Worker]
    incarnations: dict[tuple[int, int], Incarnation]
    members: list[Member]
    """Of the pool, that differ from their rows."""
    commits: tuple[Commit, ...]
    epochs: tuple[EpochRecord, ...]
    events: tuple[Event, ...]
    revision: int
    haste: Haste

    @property
    def write(self) -> JobWrite:
        return JobWrite(
            change=self.change,
            workers=self.changed,
            incarnations=list(self.incarnations.values()),
            members=self.members,
            commits=self.commits,
            epochs=self.epochs,
            events=self.events,
        )


@dataclass(slots=True, kw_only=True)
class Charge:
    """The supervisor's mutable record of one job."""

    snapshot: JobSnapshot
    attachment: Attachment
    places: Places | None = None
    """Known once the job was prepared, before its first rank is started."""
    token: str = ""
    """Of the agent of the present generation, if it is ours to start."""
    layout_secret: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """What the tokens of layouts are made of."""
    departures: frozenset[int] = frozenset()
    """Workers whose leaving was asked for, and heard."""
    agent: AgentProcess | None = None
    has_rejoined: bool = False
    """The agent is there (again) and may have missed orders."""
    is_fresh: bool = True
    """Something was learnt that no plan has looked at."""
    look_at: float = NEVER
    """When a plan has to look again though nothing was learnt."""
    revision: int = 1
    """Goes up with everything that may have to be written."""
    written_revision: int = 0
    decided: list[Action] = field(default_factory=list)
    """Taken into the snapshot, but not performed before they are durable."""
    events: list[Event] = field(default_factory=list)
    """Told, and not committed yet."""
    saved: list[tuple[Saved, Moment]] = field(default_factory=list)
    """Coordinated checkpoints that are durable, and not on record yet."""
    incarnations: dict[tuple[int, int], Incarnation] = field(default_factory=dict)
    """Processes that began or ended, by rank and incarnation, and are not on record as they are."""
    committed_members: dict[int, Member] = field(default_factory=dict)
    committed_change: JobChange | None = None
    committed_workers: dict[int, Worker] = field(default_factory=dict)

    def learn(self, happening: Happening, now: Moment) -> None:
        """Fold a happening in, and note what is worth telling."""
        self.is_fresh = True
        self.revision += 1
        before = self.snapshot
        self.snapshot = fold(before, happening, now.monotonic)
        self.note(incarnations_of(before, happening, self.snapshot, now))
        if isinstance(happening, RankSaid) and isinstance(happening.message, Saved):
            # Whoever says so, and however late: it tells of what is on the disk, which stays true
            # when its writer has been replaced. An old layout's writer is fenced off by the vault.
            self.saved.append((happening.message, now))
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
            self.attach(started_at=now.wall)

    def note(self, incarnations: Sequence[Incarnation]) -> None:
        """Have these rows written with the next draft."""
        self.incarnations |= {(row.rank, row.incarnation): row for row in incarnations}

    def decide(self, actions: Sequence[Action], now: Moment) -> None:
        """Take the actions of a plan; they are performed once that is durable."""
        for action in actions:
            self.learn(happenings.Taken(action=action), now)
            self.decided.append(action)

    def attach(self, **changes: Any) -> None:  # noqa: ANN401  fields of `Attachment`
        """Change what belongs to the row and decides nothing."""
        self.attachment = replace(self.attachment, **changes)
        self.revision += 1

    def plan(self, now: Moment) -> None:
        """Decide what is to be done now, if anything may have changed since the last look."""
        if self.decided or not (self.is_fresh or now.monotonic >= self.look_at):
            return  # what is decided already is made durable first
        self.decide(plan(self.snapshot, now.monotonic), now)
        self.is_fresh = bool(self.decided)
        self.look_at = wake_at(self.snapshot, now.monotonic)

    def draft(self, now: Moment) -> Draft:
        """Return everything that differs from the rows."""
        workers = {worker.rank: worker for worker in workers_of(self.snapshot, now)}
        change = change_of(self.snapshot, self.attachment, now)
        hastes = {
            rank: haste(self.committed_workers.get(rank), worker)
            for rank, worker in workers.items()
        }
        return Draft(
            change=change,
            workers=workers,
            changed=[workers[rank] for rank, how in hastes.items() if how is not Haste.NONE],
            incarnations=dict(self.incarnations),
            members=[
                member
                for member in members_of(self.snapshot, now)
                if _outline(member) != self.committed_members.get(member.worker_id)
            ],
            commits=tuple(commit_of(saved, at) for saved, at in self.saved),
            epochs=tuple(
                {
                    epoch.epoch: epoch for saved, _ in self.saved for epoch in epochs_of(saved)
                }.values()
            ),
            events=tuple(self.events),
            revision=self.revision,
            haste=max(self._own_haste(change), *hastes.values(), Haste.NONE),
        )

    def written(self, draft: Draft) -> None:
        """Remember that a draft is in the rows."""
        self.committed_change = draft.change
        self.committed_workers = draft.workers
        self.written_revision = draft.revision
        del self.events[: len(draft.events)]
        del self.saved[: len(draft.commits)]
        for key, row in draft.incarnations.items():
            if self.incarnations[key] is row:  # and nothing newer
                del self.incarnations[key]
        self.committed_members |= {row.worker_id: _outline(row) for row in draft.members}

    def _own_haste(self, change: JobChange) -> Haste:
        if self.decided or self.events:
            return Haste.AT_ONCE
        unwritten = self.saved or self.incarnations
        return Haste.PROGRESS if unwritten or change != self.committed_change else Haste.NONE

    def known_processes(self) -> list[ProcessRecord]:
        """Return the processes of its ranks that may run."""
        return [rank.identity for rank in self.snapshot.ranks if rank.identity is not None]

    @property
    def is_to_meet(self) -> bool:
        """Whether ranks are about to meet anew: with every agent, or whenever their gang starts."""
        occasion = Start if self.snapshot.is_gang else StartAgent
        return any(isinstance(action, occasion) for action in self.decided)

    @property
    def is_admitted(self) -> bool:
        """Whether it has left the queue and is not over: its ranks hold slots."""
        return self.snapshot.status not in TERMINAL | {JobStatus.QUEUED}

    @property
    def is_over(self) -> bool:
        return self.snapshot.status in TERMINAL


def _outline(member: Member) -> Member:
    """Return a member without its times, which are no reason to write it.

    Every beat changes the one; the other is reckoned anew from two clocks that drift apart.
    """
    return replace(member, joined_at=_NO_TIME, last_heartbeat_at=None)
