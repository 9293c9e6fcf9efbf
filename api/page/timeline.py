"""The time line of a job: a row for each rank, a bar for each phase of an attempt. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Final

from muster.contracts.views.history import AttemptView, EventView

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

BARS_LIMIT: Final = 2000

CLEAN_ENDS: Final = frozenset({"finished", "stopped"})

LOSSES: Final = frozenset({"rank_exited", "rank_killed", "peer_lost", "agent_lost", "host_lost"})
"""The events after which the ranks of a group wait until they have met anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What an attempt did for a while; places are percent of the whole time."""

    left: float
    width: float
    phase: str  # as docs/page.md has them; alive: the events do not tell
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

    ordered = sorted(attempts, key=lambda attempt: (attempt.rank, attempt.attempt))
    cleanly = (attempt for attempt in ordered if attempt.retry_class in CLEAN_ENDS)
    clean = {("rank_exited", attempt.rank, attempt.attempt) for attempt in cleanly}
    told = [event for event in events if (event.kind, event.rank, event.attempt) not in clean]
    activity = _activity(told)
    rows: dict[int, list[Bar]] = {}
    # Many ranks have fewer bars each, or the page would be large: those too short to be seen go.
    shortest = (end - created) * len(ordered) / BARS_LIMIT
    begins = {(attempt.rank, attempt.attempt): attempt.started_at for attempt in ordered}
    for attempt in ordered:
        later = begins.get((attempt.rank, attempt.attempt + 1), end)
        for phase, first, last in _phases(attempt, events, activity, end, later):
            if phase not in {"lost", "gone"} and last - first < shortest:
                continue
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
        for event in told
        if event.kind in MARKS
    ]
    return Timeline(rows=rows, marks=marks, seconds=whole)


def _activity(events: Sequence[EventView]) -> list[tuple[datetime, str]]:
    """Return since when the ranks that train together do what."""
    found: list[tuple[datetime, str]] = []
    now, saves = "", False
    for event in events:
        before, kind = now, event.kind
        saves = (saves or kind == "checkpoint_requested") and kind != "checkpoint_saved"
        if kind == "step_taken":
            now = "training"
        elif kind == "job_paused":
            now = "paused"
        elif kind == "resume_requested" or (kind in LOSSES and now == "training"):
            now = "waiting"
        elif kind in {"group_announced", "checkpoint_saved"} and now != "paused":
            now = "saving" if saves else "waiting"
        if now != before:
            found.append((event.at, now))
    return found


def _phases(
    attempt: AttemptView,
    events: Sequence[EventView],
    activity: Sequence[tuple[datetime, str]],
    now: datetime,
    later: datetime,
) -> Iterator[tuple[str, datetime, datetime]]:
    """Yield what an attempt did one after the other; `later` is when its rank has another one."""
    begin, end = attempt.started_at, attempt.ended_at or now

    def first_of(kind: str, since: datetime) -> datetime | None:
        times = (event.at for event in events if event.kind == kind)
        return next((at for at in times if since <= at <= end), None)

    me = attempt.rank, attempt.attempt
    own = [event for event in events if (event.rank, event.attempt) == me]
    ready = next((event.at for event in own if event.kind == "rank_ready"), None)
    since = ready or begin
    # A step of the others before the group that took this rank in is none of its own.
    trains = first_of("step_taken", first_of("group_announced", since) or since)
    is_begun = attempt.step_at_start is None or attempt.step_at_end == attempt.step_at_start
    is_known = not events or events[0].kind == "submitted" or events[0].at <= begin
    starts = [(begin, "starting" if is_known and (trains or ready or is_begun) else "alive")]
    if ready and is_known:
        starts.append((ready, "restoring" if activity else "alive"))
    if trains and is_known:
        starts.append((trains, "training"))
    begun = (trains or end) if is_known else begin
    starts += [(at, phase) for at, phase in activity if begun < at < end]
    for (first, phase), (last, _) in pairwise([*starts, (end, "")]):
        yield phase, first, last
    if attempt.ended_at is not None and attempt.retry_class not in CLEAN_ENDS:
        yield "lost", end, end
        yield "gone", end, later
