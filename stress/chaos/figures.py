"""Figures of a chaos run: when each fault was detected, and when the system had recovered.

*Detected*: the job's event about the fault; for a service, the restarter that saw it end.

*Recovered*, for a rank: the first poll in which the job is healthy, without the victim, and further
than before the fault; for the API its first response. For an agent or a coordinator: the job has an
agent that is connected to a coordinator and has ranks; for a coordinator this is the last of all
healthy jobs. A process that is hit again before that has no such time; its successor has.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import quantiles

from cli.output import table
from muster.contracts.job.status import TERMINAL
from stress.chaos.faults import Kind, Victim
from stress.chaos.observer import Look
from stress.chaos.strikes import Strike

ENDS_OF_A_RANK = frozenset({"rank_exited", "rank_killed"})
AGENT_LOST, AGENT_ADOPTED = "agent_lost", "agent_adopted"
END_OF_A_JOB = frozenset(f"job_{status.lower()}" for status in TERMINAL)
ADOPTABLE = frozenset({Victim.AGENT, Victim.COORDINATOR})
UNREPORTED = frozenset({Victim.SPARE, Victim.PREFORK, Victim.FORK_SERVER, Victim.STORAGE})
"""Processes whose ends cause no event."""
NOT_LONG_SECONDS = 60.0
"""A later event has another cause."""

HEADER = (
    *("victim", "fault", "injected", "observed", "in a save", "detected p50", "p95"),
    *("recovered p50", "p95", "ranks restarted"),
)
SHOWN_RESTARTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a job."""

    at: float
    kind: str
    rank: int | None
    attempt: int | None
    message: str = ""

    @classmethod
    def read(cls, event: Mapping[str, object]) -> "Event":
        at = datetime.fromisoformat(str(event["at"])).timestamp()
        rank, attempt = event["rank"], event["attempt"]
        assert isinstance(rank, int | None)
        assert isinstance(attempt, int | None)
        return cls(
            at=at,
            kind=str(event["kind"]),
            rank=rank,
            attempt=attempt,
            message=str(event["message"]),
        )


@dataclass(slots=True, kw_only=True)
class Row:
    """All faults of one kind for one kind of victim."""

    injected: int = 0
    observed: int = 0
    inside: int = 0
    restarted: int = 0
    """Ranks that restarted because of it, except the victim."""
    detected_seconds: list[float] = field(default_factory=list)
    recovered_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Everything that was observed in a run."""

    strikes: Sequence[Strike]
    looks: Sequence[Look]
    events: Mapping[str, Sequence[Event]]
    """Of each job."""
    ends: Mapping[Victim, Sequence[float]]
    """Of each service."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """What each job trains."""

    def rows(self) -> dict[tuple[Victim, Kind], Row]:
        """Return the table; restarts without a cause are in a row without a victim."""
        rows: dict[tuple[Victim, Kind], Row] = defaultdict(Row)
        for strike in self.strikes:
            row = rows[strike.fault.victim, strike.fault.kind]
            row.injected += 1
            row.observed += strike.observed
            row.inside += strike.inside
            self._time(strike, row)
        for _, cause in self._restarts():
            if cause is not None:
                rows[cause.fault.victim, cause.fault.kind].restarted += 1
        return rows

    def unexplained(self) -> Iterator[str]:
        """Yield one sentence for each restart without a fault that explains it."""
        return (sentence for sentence, cause in self._restarts() if cause is None)

    def collateral(self) -> Iterator[str]:
        """Yield one sentence for each restart of a rank caused by a fault of another process."""
        for sentence, cause in self._restarts():
            if cause is not None:
                yield f"{sentence}; before that: {cause}"

    def _time(self, strike: Strike, row: Row) -> None:
        detected = self._detected_at(strike)
        if detected is not None:
            row.detected_seconds.append(detected - strike.at)
        is_adoptable = strike.fault.victim in ADOPTABLE
        recovered = self._adopted_at(strike) if is_adoptable else self._healthy_at(strike, detected)
        if recovered is not None:
            row.recovered_seconds.append(recovered - strike.at)

    def _detected_at(self, strike: Strike) -> float | None:
        target = strike.target
        if not strike.fault.kind.ends or strike.fault.victim in UNREPORTED:
            return None
        if target.job_id is None:
            return _first_after(strike.at, self.ends[strike.fault.victim])
        is_rank = strike.fault.victim is Victim.RANK
        concerned = [
            event.at
            for event in self.events.get(target.job_id, ())
            if event.kind == AGENT_LOST
            or (is_rank and event.kind in ENDS_OF_A_RANK and event.rank == target.rank)
        ]
        return _first_after(strike.at, concerned)

    def _adopted_at(self, strike: Strike) -> float | None:
        """Return when all affected agents were connected again; None if there was none."""
        if not strike.fault.kind.ends:
            return None
        there = [self._adoption(job_id, strike.at) for job_id in self._concerned(strike)]
        found = [at for at in there if at is not None]
        if not found or self._is_struck_again(strike, max(found)):
            return None
        return max(found)

    def _concerned(self, strike: Strike) -> list[str]:
        if strike.target.job_id is not None:
            return [strike.target.job_id]
        before = next((it for it in reversed(self.looks) if it.at <= strike.at), None)
        jobs = {} if before is None else before.jobs
        return [job_id for job_id, seen in jobs.items() if seen.is_well and not seen.is_over]

    def _adoption(self, job_id: str, since: float) -> float | None:
        """Return when the job's agent was connected again, unless the job ended before."""
        kinds = {AGENT_ADOPTED, *END_OF_A_JOB}
        later = [it for it in self.events[job_id] if it.kind in kinds and it.at > since]
        return later[0].at if later and later[0].kind == AGENT_ADOPTED else None

    def _is_struck_again(self, strike: Strike, until: float) -> bool:
        def whom(it: Strike) -> tuple[Victim, str | None]:
            return it.fault.victim, it.target.job_id

        return any(
            whom(it) == whom(strike) and it.fault.kind.ends and strike.at < it.at < until
            for it in self.strikes
        )

    def _healthy_at(self, strike: Strike, detected: float | None) -> float | None:
        if detected is None:
            return None
        later = [look for look in self.looks if detected < look.at < strike.at + NOT_LONG_SECONDS]
        job_id, pid = strike.target.job_id, strike.target.record.pid
        if job_id is None:  # the API answers
            return later[0].at if later else None
        before = (
            it.jobs[job_id]
            for it in reversed(self.looks)
            if it.at <= strike.at and job_id in it.jobs
        )
        if (seen_before := next(before, None)) is None:
            return None
        for look in later:
            seen = look.jobs.get(job_id)
            if seen is not None and (
                seen.is_over
                or (
                    seen.is_well
                    and seen.step > seen_before.step
                    and all(rank.pid != pid for rank in seen.ranks)
                )
            ):
                return look.at
        return None

    # Causes of restarts

    def _restarts(self) -> Iterator[tuple[str, Strike | None]]:
        """Yield each restart of a rank that no fault hit, and the fault that caused it."""
        for job_id, events in self.events.items():
            started: dict[int | None, Event] = {}
            for event in events:
                if event.kind != "rank_started":
                    continue
                before = started.get(event.rank)
                started[event.rank] = event
                if before is None or before.attempt == event.attempt:
                    continue  # its first process, or the same one reported again
                cause = self._cause(job_id, before, event.at)
                if cause is None or cause.fault.victim is not Victim.RANK:
                    ends = (
                        it.message
                        for it in reversed(events)
                        if before.at < it.at <= event.at and it.kind in ENDS_OF_A_RANK
                        if it.rank == event.rank
                    )
                    words = f"rank {event.rank} of {self._name(job_id)} was started again"
                    why = next(ends, "its end was not recorded")
                    yield f"{words} at {_clock(event.at)} ({why})", cause

    def _name(self, job_id: str) -> str:
        kind = self.kinds.get(job_id)
        return job_id if kind is None else f"{job_id} ({kind})"

    def _cause(self, job_id: str, started: Event, until: float) -> Strike | None:
        """Return the last fault between a start and `until`, the next one, that explains that.

        Faults that ended the rank come first, then those that ended its agent or the coordinator;
        a process that only stopped for a moment is the last explanation.
        """
        between = [it for it in self.strikes if started.at < it.until and it.at < until]
        own = [
            it
            for it in between
            if (it.target.job_id, it.target.rank) == (job_id, started.rank)
            # A spare process may become a rank just before the signal.
            or started.message.endswith(f" pid {it.target.record.pid}")
        ]
        others = [it for it in between if _may_end_ranks(it, job_id)]
        ends, stands = [it for it in own if it.fault.kind.ends], [*others, *own]
        found = ends or [it for it in others if it.fault.kind.ends] or stands
        return found[-1] if found else None


def _may_end_ranks(strike: Strike, job_id: str) -> bool:
    """True if this fault of another process may restart ranks of the job."""
    victim = strike.fault.victim
    is_agent = victim is Victim.AGENT and strike.target.job_id == job_id
    return is_agent or victim is Victim.COORDINATOR


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S.%f")


def _first_after(moment: float, times: Sequence[float]) -> float | None:
    return min((it for it in times if moment < it < moment + NOT_LONG_SECONDS), default=None)


def figures(history: History) -> Iterator[str]:
    """Yield a table of all faults, and the restarts that faults of other processes caused."""
    rows = [
        (
            victim,
            kind,
            row.injected,
            row.observed,
            row.inside,
            *_percentiles(row.detected_seconds),
            *_percentiles(row.recovered_seconds),
            row.restarted,
        )
        for (victim, kind), row in sorted(history.rows().items())
    ]
    yield from table(HEADER, rows)
    yield from list(history.collateral())[:SHOWN_RESTARTS]


def _percentiles(seconds: Sequence[float]) -> tuple[str | None, str | None]:
    """Return p50 and p95 as text."""
    if not seconds:
        return None, None
    # quantiles() needs two values.
    cuts = quantiles([*seconds, *seconds[: 2 - len(seconds)]], n=100, method="inclusive")
    return f"{cuts[49]:.2f} s", f"{cuts[94]:.2f} s"
