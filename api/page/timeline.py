"""The time line of a job: a row for each rank, a bar for each phase of an attempt. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from muster.contracts.views import AttemptView, EventView

MARKS: Final[Mapping[str, str]] = {
    "group_announced": "round",
    "fault_injected": "fault",
    "rank_exited": "fault",
    "agent_lost": "fault",
    "host_lost": "fault",
    "agent_adopted": "takeover",
    "scale_requested": "scaling",
    "job_paused": "pause",
    "job_completed": "end",
    "job_failed": "end",
    "job_stopped": "end",
}
"""The events that are drawn across all rows, and as what."""

CLEAN_ENDS: Final = frozenset({"finished", "stopped"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What an attempt did for a while; places are percent of the whole time."""

    left: float
    width: float
    phase: str  # starting, training, alive (not known which), lost (it was not asked to end)
    title: str
    rank: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event; `rank` is None if it concerns all."""

    left: float
    kind: str
    title: str
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    rows: Mapping[int, Sequence[Bar]]
    marks: Sequence[Mark]
    seconds: float


def timeline(
    created: datetime, end: datetime, attempts: Iterable[AttemptView], events: Sequence[EventView]
) -> Timeline:
    """Return what happened between two moments."""
    whole = max((end - created).total_seconds(), 1.0)

    def place(at: datetime) -> float:
        return round(100 * min(max((at - created).total_seconds() / whole, 0.0), 1.0), 3)

    ready = _first_steps(events)
    rows: dict[int, list[Bar]] = {}
    for attempt in sorted(attempts, key=lambda it: (it.rank, it.attempt)):
        for phase, first, last in _phases(attempt, ready, end):
            ended = attempt.message or attempt.retry_class or "runs"
            bar = Bar(
                left=place(first),
                width=round(max(place(last) - place(first), 0.1), 3),
                phase=phase,
                title=f"rank {attempt.rank}, attempt {attempt.attempt}: {phase}; {ended}",
                rank=attempt.rank,
                attempt=attempt.attempt,
            )
            rows.setdefault(attempt.rank, []).append(bar)
    marks = [
        Mark(left=place(event.at), kind=MARKS[event.kind], title=event.message, rank=event.rank)
        for event in events
        if event.kind in MARKS
    ]
    return Timeline(rows=rows, marks=marks, seconds=whole)


def _first_steps(events: Sequence[EventView]) -> list[datetime]:
    """Return when ranks began to train, after they had started or met anew."""
    return [it.at for it in events if it.kind == "step_taken"]


def _phases(
    attempt: AttemptView, steps: Sequence[datetime], until: datetime
) -> Iterator[tuple[str, datetime, datetime]]:
    begin, end = attempt.started_at, attempt.ended_at or until
    trains = next((at for at in steps if begin <= at <= end), None)
    is_known = attempt.step_at_start is None or attempt.step_at_end == attempt.step_at_start
    if trains is None:
        yield "starting" if is_known else "alive", begin, end
    else:
        yield "starting", begin, trains
        yield "training", trains, end
    if attempt.ended_at is not None and attempt.retry_class not in CLEAN_ENDS:
        yield "lost", end, end
