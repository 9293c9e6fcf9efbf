"""One job of a coordinator: what is known of it, and what of that is not durable yet."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import msgspec

from coordinator.decide import actions
from coordinator.decide.actions import Action, Observation
from coordinator.decide.events import event_of
from coordinator.decide.fold import fold
from coordinator.decide.plan import plan, wake_at
from coordinator.decide.state.job import JobSnapshot
from coordinator.decide.state.rank import NEVER, RankSnapshot
from coordinator.launchers.launcher import AgentProcess
from coordinator.persistence import (
    Attachment,
    Moment,
    Urgency,
    agent_rows,
    attempt_rows,
    commit_row,
    job_row,
    member_rows,
    rank_rows,
    rank_urgency,
    timeless,
)
from coordinator.series import JobSeries
from database.records import (
    AgentRecord,
    Attempt,
    Event,
    JobChange,
    JobWrite,
    MemberRecord,
    RankRecord,
    utc_now,
)
from muster.contracts.job.status import TERMINAL, JobStatus
from muster.contracts.messages.agent import RankExited, RankSaid
from muster.contracts.messages.rank import Heartbeat, Saved
from muster.contracts.rank import ProcessRecord
from muster.contracts.series import THROUGHPUT, aggregate
from muster.contracts.settings.paths import JobFiles
from muster.contracts.views.history import FaultView
from muster.job_defaults import ResolvedSpec
from muster.runtime.exit_report import find_exit_record


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What has to be committed for one job, and what is noted once it is."""

    write: JobWrite
    ranks: dict[int, RankRecord]  # all, also those that are written already
    revision: int
    urgency: Urgency


@dataclass(slots=True, kw_only=True)
class TrackedJob:
    """One job: what is known of it, and what of that is not durable yet."""

    snapshot: JobSnapshot
    attachment: Attachment
    places: ResolvedSpec | None = None
    """Known once the job was prepared, before its first rank is started."""
    tokens: dict[str, str] = field(default_factory=dict)
    """By host: of the agents that this coordinator starts."""
    group_secret: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """From which the tokens of group rounds are derived."""
    leaving: frozenset[int] = frozenset()  # workers whose leave request was folded in
    agents: dict[str, AgentProcess] = field(default_factory=dict)  # by host: those that may run
    faults: list[FaultView] = field(default_factory=list)  # that were requested, to be injected
    faults_seen: int = 0  # how many ever were
    addresses: dict[str, str] = field(default_factory=dict)
    """By host: where the agents say that others reach them, if the cluster file does not."""
    senders: set[str] = field(default_factory=set)  # hosts that send their checkpoints
    repeat_to: set[str] = field(default_factory=set)
    """Hosts whose agent has connected and may have missed requests."""
    has_news: bool = True  # something changed since the last plan
    plan_at: float = NEVER  # when the next plan is due even without news
    revision: int = 1  # rises with every change that may have to be written
    written_revision: int = 0
    decided: list[Action] = field(default_factory=list)
    """In the snapshot already; performed once they are durable."""
    events: list[Event] = field(default_factory=list)
    saved: list[tuple[Saved, Moment]] = field(default_factory=list)
    """Durable checkpoints that are not in the rows yet."""
    attempts: dict[tuple[int, int], Attempt] = field(default_factory=dict)
    """Changed attempts that are not in the rows yet, by rank and attempt."""
    takes_code: bool = False  # its next start takes the code as it is
    kept_code: Mapping[str, str] = field(default_factory=dict)  # in its directory
    committed_agents: dict[str, AgentRecord] = field(default_factory=dict)
    committed_members: dict[int, MemberRecord] = field(default_factory=dict)
    committed_change: JobChange | None = None
    committed_ranks: dict[int, RankRecord] = field(default_factory=dict)
    series: JobSeries = field(default_factory=JobSeries)

    def observe(self, observation: Observation, now: Moment) -> None:
        """Fold an observation in and collect the rows that follow from it."""
        self.has_news = True
        self.revision += 1
        before = self.snapshot
        self.snapshot = fold(before, observation, now.monotonic)
        self.add_attempts(attempt_rows(before, self.snapshot, now))
        if isinstance(observation, RankSaid) and isinstance(observation.message, Saved):
            # A checkpoint on the disk stays true however late the report comes, also if its writer
            # was replaced: the checkpoint manager fences off writers of earlier group rounds.
            self.saved.append((observation.message, now))
        if isinstance(observation, RankSaid) and isinstance(observation.message, Heartbeat):
            self._take_values(before, observation, observation.message, now)
        new = event_of(before, observation, self.snapshot)
        if new is not None:
            self.events.append(Event(at=now.wall, **asdict(new)))
        if self.attachment.started_at is None and self.snapshot.status is JobStatus.STARTING:
            self.attach(started_at=now.wall)

    def _take_values(
        self, before: JobSnapshot, said: RankSaid, beat: Heartbeat, now: Moment
    ) -> None:
        """Put the values of a heartbeat into the series."""

        def is_alive(rank: int, attempt: int) -> bool:
            known = self.snapshot.ranks[rank] if 0 <= rank < len(self.snapshot.ranks) else None
            return known is not None and known.is_alive and known.attempt.number == attempt

        snapshot, window = self.snapshot, beat.window
        if window is None or not is_alive(said.rank, said.attempt):
            return
        is_one_model = snapshot.is_synchronous or snapshot.is_gang
        first = next((rank.rank for rank in snapshot.in_service), None)
        if not is_one_model and said.rank != first:
            return  # independent ranks train different models: one of them is shown
        values = {name: own for name, own in window.values.items() if name != THROUGHPUT}
        measured = snapshot.ranks[said.rank].attempt.throughput
        if before.ranks[said.rank].attempt.throughput.at not in {NEVER, measured.at}:
            values[THROUGHPUT] = aggregate([measured.steps_per_sec])
        window = msgspec.structs.replace(window, values=values)
        self.series.take(said.rank, said.attempt, window, now.wall, is_alive)

    def note(self, kind: str, message: str, at: datetime | None = None) -> None:
        """Have an event written about something on which no decision depends."""
        self.events.append(Event(at=at or utc_now(), kind=kind, message=message))
        self.revision += 1

    def add_attempts(self, rows: Sequence[Attempt]) -> None:
        """Have these rows written with the next draft."""
        self.attempts |= {(row.rank, row.attempt): row for row in rows}

    def decide(self, decided: Sequence[Action], now: Moment) -> None:
        """Take actions into the snapshot; they are performed once that is durable."""
        for action in decided:
            self.observe(actions.ActionTaken(action=action), now)
            self.decided.append(action)

    def attach(self, **changes: Any) -> None:  # noqa: ANN401  fields of `Attachment`
        """Change fields of the row that no decision depends on."""
        self.attachment = replace(self.attachment, **changes)
        self.revision += 1

    def plan(self, now: Moment) -> None:
        """Decide what is due, if anything may have changed since the last plan."""
        if self.decided or not (self.has_news or now.monotonic >= self.plan_at):
            return  # earlier decisions are made durable first
        self.decide(plan(self.snapshot, now.monotonic), now)
        self.has_news = bool(self.decided)
        self.plan_at = wake_at(self.snapshot, now.monotonic)

    def draft(self, now: Moment) -> Draft:
        """Return everything that differs from the rows."""
        ranks = {record.rank: record for record in rank_rows(self.snapshot, now)}
        change = job_row(self.snapshot, self.attachment, now)
        urgencies = {
            rank: rank_urgency(self.committed_ranks.get(rank), record)
            for rank, record in ranks.items()
        }
        epochs = {epoch.epoch: epoch for saved, _ in self.saved for epoch in saved.epochs}
        members = member_rows(self.snapshot, now)
        agents = agent_rows(self.snapshot, self.attachment)
        write = JobWrite(
            change=change,
            agents=[agent for agent in agents if agent != self.committed_agents.get(agent.host)],
            ranks=[ranks[rank] for rank, u in urgencies.items() if u is not Urgency.NONE],
            attempts=list(self.attempts.values()),
            members=[m for m in members if timeless(m) != self.committed_members.get(m.worker_id)],
            commits=tuple(commit_row(saved, at) for saved, at in self.saved),
            epochs=tuple(epochs.values()),
            series=tuple(self.series.points.values()),
            series_due=frozenset(self.series.due),
            events=tuple(self.events),
        )
        urgency = max(urgencies.values(), default=Urgency.NONE)
        if self.saved or self.attempts or write.agents or change != self.committed_change:
            urgency = max(urgency, Urgency.PROGRESS)
        if self.events:
            urgency = max(urgency, Urgency.SOON)
        if self.decided:
            urgency = Urgency.NOW
        return Draft(write=write, ranks=ranks, revision=self.revision, urgency=urgency)

    @property
    def may_announce(self) -> bool:
        """True if the decided group round directly follows the durable one.

        A successor skips that round, so it may be sent before the commit: survivors do not wait.
        """
        written = 0 if self.committed_change is None else self.committed_change.group_round
        is_decided = any(isinstance(action, actions.PublishGroup) for action in self.decided)
        return is_decided and 0 < written == self.snapshot.group.round - 1

    def mark_written(self, draft: Draft) -> None:
        """Note that a draft was committed."""
        write = draft.write
        self.committed_change = write.change
        self.committed_ranks = draft.ranks
        self.written_revision = draft.revision
        del self.events[: len(write.events)]
        del self.saved[: len(write.commits)]
        for point in write.series:
            if self.series.points.get((point.name, point.at)) is point:  # not grown since
                del self.series.points[point.name, point.at]
        self.series.due -= write.series_due
        for row in write.attempts:
            key = (row.rank, row.attempt)
            if self.attempts[key] is row:  # not replaced since
                del self.attempts[key]
        self.committed_agents |= {row.host: row for row in write.agents}
        self.committed_members |= {row.worker_id: timeless(row) for row in write.members}

    def known_processes(self, host: str) -> list[ProcessRecord]:
        """Return the processes of its ranks that may run on a host."""
        attempts = (rank.attempt for rank in self.snapshot.ranks_on(host))
        return [attempt.identity for attempt in attempts if attempt.identity is not None]

    def unreported_ends(
        self, files: JobFiles, ranks: Iterable[RankSnapshot]
    ) -> list[RankSaid | RankExited]:
        """Return the recorded ends of these ranks, whose agent went before it could report them."""
        ends: list[RankSaid | RankExited] = []
        for rank, attempt in ((rank, rank.attempt) for rank in ranks if rank.is_alive):
            record = find_exit_record(files, rank.rank, attempt.number, attempt.identity)
            ends += [] if record is None else [*record.said, record.exited]
        return ends

    def is_connected(self, host: str, agent_number: int) -> bool:
        """Return True if this agent is connected."""
        agent = self.snapshot.agents[host]
        return agent.agent_number == agent_number and agent.is_connected

    @property
    def needs_new_port(self) -> bool:
        """True if ranks meet anew: a gang that starts, or an agent while no rank runs."""
        occasion = actions.Start if self.snapshot.is_gang else actions.StartAgent
        is_anew = self.snapshot.is_gang or not self.snapshot.any_alive
        return is_anew and any(isinstance(action, occasion) for action in self.decided)

    @property
    def is_admitted(self) -> bool:
        """True if it has left the queue and is not over: it holds slots."""
        return self.snapshot.status not in TERMINAL | {JobStatus.QUEUED}

    @property
    def is_over(self) -> bool:
        return self.snapshot.status in TERMINAL
