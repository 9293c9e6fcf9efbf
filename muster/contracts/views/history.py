"""REST views of what has happened to a job: events, attempts, audit, series and logs."""

from signal import Signals
from typing import Annotated, Literal, TypeAlias

from muster.contracts.views.view import Bits, Moment, View, doc

Fault: TypeAlias = Literal["kill", "stop", "term"]


class StruckProcess(View, frozen=True, kw_only=True):
    rank: int
    attempt: int
    pid: int


class FaultView(View, frozen=True, kw_only=True):
    """A requested fault. No other attempt is struck, and none twice."""

    number: Annotated[int, doc("Counts the faults of a job.")]
    fault: Fault
    host: str
    agent: Annotated[int | None, doc("The agent that dies with all its ranks; null: none.")]
    processes: list[StruckProcess]

    @property
    def signal(self) -> Signals:
        return Signals[f"SIG{self.fault.upper()}"]


class EventView(View, frozen=True, kw_only=True):
    """One event of a job."""

    at: Moment
    kind: Annotated[str, doc("A past participle, such as submitted or rank_exited.")]
    message: str
    rank: int | None = None
    attempt: int | None = None
    actor: Annotated[
        str | None, doc("Who asked for it, such as token:ci; null if the system did it.")
    ] = None
    event_id: Annotated[
        int | None, doc("Its position: ask for later ones with the parameter `after`.")
    ] = None


class EventList(View, frozen=True, kw_only=True):
    job_id: str
    events: list[EventView]


class AttemptView(View, frozen=True, kw_only=True):
    """One attempt of a rank: one process. Fields about its exit are null while it lives."""

    rank: int
    attempt: int
    pid: Annotated[int | None, doc("Kept after the exit; null before it is known.")]
    started_at: Moment
    ended_at: Moment | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    retry_class: Annotated[
        str | None,
        doc(
            "finished, stopped, crash, killed, hang, out_of_memory, preemption, infrastructure, "
            "invalid_program or do_not_retry"
        ),
    ] = None
    reason: Annotated[str | None, doc("Why, for machines. New words may come.")] = None
    message: Annotated[str | None, doc("Why, in words, with the last line of its log.")] = None
    step_at_start: Annotated[int | None, doc("null while it is unknown")] = None
    step_at_end: int | None = None


class AttemptList(View, frozen=True, kw_only=True):
    job_id: str
    attempts: list[AttemptView]


class EpochView(View, frozen=True, kw_only=True):
    """One pass over the data. Hashes are sums modulo 2**64, as 16 hex digits."""

    epoch: int
    samples: Annotated[int, doc("Lines read and committed.")]
    expected_samples: Annotated[int, doc("Lines in the data set.")]
    hash: Annotated[str, doc("Of the lines that were read.")]
    expected_hash: Annotated[str, doc("Of the lines in the data set.")]
    exactly_once: Annotated[bool | None, doc("null while the epoch is being read")]


class CheckpointView(View, frozen=True, kw_only=True):
    """A durable checkpoint of all ranks together."""

    step: int
    epoch: int
    generation: int
    digest: Annotated[
        str, doc("Identical for identical weights, optimizer state and position, bit for bit.")
    ]
    saved_at: Moment


class AuditView(View, frozen=True, kw_only=True):
    """The proof that every sample was read exactly once; of synchronous jobs only."""

    job_id: str
    complete: Annotated[bool, doc("The job is COMPLETED and reads nothing more.")]
    exactly_once: Annotated[
        bool | None,
        doc("Whether every requested epoch was, including unlisted ones; null while unknown."),
    ]
    bits: Bits = "same"
    epochs: Annotated[list[EpochView], doc("The last ones, the newest last.")]
    epochs_omitted: Annotated[int, doc("Earlier ones that are not listed.")]
    checkpoints: Annotated[list[CheckpointView], doc("The last ones, the newest last.")]
    checkpoints_omitted: Annotated[
        int, doc("Earlier ones that are not listed; the last 1000 are on record.")
    ]


class SeriesColumns(View, frozen=True, kw_only=True):
    """Points in order, one list for each of their fields.

    A point stands for all values after the point before it. Where none of them was finite, `first`,
    `least`, `greatest` and `last` are null.
    """

    step: Annotated[list[int], doc("The step of the last value.")]
    seconds: Annotated[list[float], doc("When it became known, after `began_at`.")]
    first: list[float | None]
    least: list[float | None]
    greatest: list[float | None]
    last: list[float | None]
    count: Annotated[list[int], doc("How many were finite.")]
    not_finite: Annotated[list[int], doc("How many were NaN or infinite.")]


class SeriesView(View, frozen=True, kw_only=True):
    """What a job has reported under one name."""

    live: Annotated[SeriesColumns, doc("The steps rise.")]
    abandoned: Annotated[
        SeriesColumns, doc("Points beyond a step to which training has gone back.")
    ]


class SeriesList(View, frozen=True, kw_only=True):
    job_id: str
    began_at: Annotated[Moment, doc("When the job was created.")]
    names: Annotated[list[str], doc("Of all series of the job.")]
    series: dict[str, SeriesView]


class LogLineView(View, frozen=True, kw_only=True):
    rank: int
    time: Annotated[Moment | None, doc("When it was written; null while unknown.")] = None
    line: str


class LogTail(View, frozen=True, kw_only=True):
    job_id: str
    tail: int
    lines: list[LogLineView]
