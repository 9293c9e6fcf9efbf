"""The metrics of `GET /metrics`: one declaration each, and a collector that reads a scrape at once.

Nothing is counted in the background but requests: a scrape reads the rows that the REST views show.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from api.dependencies import AppState
from api.views import summary
from database.errors import DatabaseError
from muster.contracts.job.status import JobStatus
from muster.contracts.rank import ProcessState
from muster.contracts.views.job import FINISHED, WAITING, SummaryView

ENDED_SHOWN: Final = timedelta(minutes=10)
"""A job that is over is still scraped a few times, so that its last numbers are on record."""

ENDED_LIMIT: Final = 1000
"""Most of them: each job is about thirty series."""

UNITS: Final = ("seconds", "bytes")

Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily
Samples: TypeAlias = Iterable[tuple[Sequence[str], float | None]]
Number: TypeAlias = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """What one scrape shows; a field with a default is unknown while its source is away."""

    now: datetime
    requests: Mapping[tuple[str, int], int]
    disk_free_bytes: int | None = None
    disk_size_bytes: int | None = None
    is_database_up: bool = False
    is_coordinated: bool | None = None
    lease_age_seconds: float | None = None
    statuses: Mapping[JobStatus, int] = field(default_factory=dict)
    slots: int | None = None
    slots_taken: int | None = None
    jobs: Sequence[SummaryView] = ()


class Metric(NamedTuple):
    """One metric. An unknown value is left out."""

    name: str  # its unit comes last, `_total` for a counter
    meaning: str
    samples: Callable[[Scrape], Samples]
    labels: tuple[str, ...] = ()

    def family(self, scrape: Scrape) -> Family:
        _, _, last = self.name.rpartition("_")
        kind = CounterMetricFamily if last == "total" else GaugeMetricFamily
        unit = last if last in UNITS else ""
        family = kind(self.name, self.meaning, labels=self.labels, unit=unit)
        for labels, value in self.samples(scrape):
            if value is not None:
                family.add_metric(labels, value)
        return family


def _service(name: str, meaning: str, value: Callable[[Scrape], Number]) -> Metric:
    return Metric(name, meaning, lambda scrape: [((), value(scrape))])


def _job(
    name: str,
    meaning: str,
    value: Callable[[SummaryView, datetime], Number | Mapping[str, float]],
    label: str | None = None,
) -> Metric:
    """Return a metric of each job; one with a `label` has a value for each value of that."""

    def samples(scrape: Scrape) -> Samples:
        for job in scrape.jobs:
            whose, found = (job.job_id, job.name or ""), value(job, scrape.now)
            if isinstance(found, Mapping):
                yield from (((*whose, kind), number) for kind, number in found.items())
            else:
                yield whose, found

    return Metric(name, meaning, samples, ("job_id", "name", *([label] if label else [])))


def _ranks_by_state(job: SummaryView) -> Mapping[str, int]:
    found = Counter(worker.process for worker in job.workers)
    # Zeros, too: a graph or an alert needs the value before the first one.
    return {state: found[state] for state in (*ProcessState, WAITING, FINISHED)}


def _checkpoint(
    name: str, meaning: str, value: Callable[[datetime, int, datetime], float]
) -> Metric:
    """Return a metric of the time and the bytes of the newest checkpoint, and of the time now."""

    def of_newest(job: SummaryView, now: datetime) -> Number:
        told = ((rank.last_checkpoint_at, rank.last_checkpoint_bytes or 0) for rank in job.workers)
        saved = [(at, size) for at, size in told if at is not None]
        return value(*max(saved), now) if saved else None

    return _job(name, meaning, of_newest)


METRICS: Final = (
    _service(
        "muster_database_up", "1 if the database can be read.", lambda scrape: scrape.is_database_up
    ),
    _service(
        "muster_coordinator_up", "1 if a coordinator works.", lambda scrape: scrape.is_coordinated
    ),
    _service(
        "muster_coordinator_lease_age_seconds",
        "Time since the lease was seen to be renewed; absent if no coordinator holds it.",
        lambda scrape: scrape.lease_age_seconds,
    ),
    _service(
        "muster_disk_free_bytes",
        "Free on the disk of the data directory.",
        lambda scrape: scrape.disk_free_bytes,
    ),
    _service("muster_disk_size_bytes", "Size of that disk.", lambda scrape: scrape.disk_size_bytes),
    Metric(
        "muster_http_requests_total",
        "Responses by the template of the path and by status code.",
        lambda scrape: (
            ((path, str(code)), count) for (path, code), count in scrape.requests.items()
        ),
        ("route", "code"),
    ),
    Metric(
        "muster_jobs",
        "Jobs by status.",
        lambda scrape: (((status,), count) for status, count in scrape.statuses.items()),
        ("status",),
    ),
    _service(
        "muster_queue_jobs",
        "Jobs that wait for slots or for a coordinator.",
        lambda scrape: scrape.statuses.get(JobStatus.QUEUED),
    ),
    _service(
        "muster_slots", "Ranks that fit on the known hosts at once.", lambda scrape: scrape.slots
    ),
    _service(
        "muster_slots_taken", "Ranks that have a process there.", lambda scrape: scrape.slots_taken
    ),
    _job(
        "muster_job_status",
        "1, with the present status as label.",
        lambda job, _: {job.status: 1},
        "status",
    ),
    _job("muster_job_steps", "Steps done, as in the summary.", lambda job, _: job.step),
    _job(
        "muster_job_steps_per_second",
        "Steps a second, as in the summary.",
        lambda job, _: job.throughput_steps_per_sec,
    ),
    _job("muster_job_loss", "Mean of the last losses of the ranks.", lambda job, _: job.loss),
    _job(
        "muster_job_metric",
        "Mean of what the ranks reported last under that name.",
        lambda job, _: job.metrics,
        "metric",
    ),
    _job("muster_job_ranks", "Ranks by state.", lambda job, _: _ranks_by_state(job), "state"),
    _checkpoint(
        "muster_job_checkpoint_timestamp_seconds",
        "When the newest checkpoint was saved, by the clock of its host.",
        lambda at, _size, _now: at.timestamp(),
    ),
    _checkpoint(
        "muster_job_checkpoint_age_seconds",
        "Time since that checkpoint was saved.",
        lambda at, _size, now: max((now - at).total_seconds(), 0.0),
    ),
    _checkpoint(
        "muster_job_checkpoint_bytes",
        "Size of its arrays: of all ranks together, or of one if each saves its own.",
        lambda _at, size, _now: size,
    ),
    _job(
        "muster_job_attempts_ended_total",
        "Attempts that have ended, by the class of their end.",
        lambda job, _: job.endings,
        "retry_class",
    ),
)
"""All of them, in the order of a scrape."""


class ScrapeCollector:
    """Reads the state of the service anew for each scrape."""

    def __init__(self, read: Callable[[], Scrape]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        scrape = self._read()
        return (metric.family(scrape) for metric in METRICS)


def read_scrape(state: AppState) -> Scrape:
    """Return what there is to show now; nothing of the database while that is away."""
    # The copy is atomic: the event loop counts on meanwhile.
    scrape = Scrape(now=state.clock(), requests=state.requests.copy())
    with suppress(OSError):
        disk = shutil.disk_usage(state.data_dir.root)
        scrape = replace(scrape, disk_free_bytes=disk.free, disk_size_bytes=disk.total)
    with suppress(DatabaseError):
        jobs = state.jobs.lately_active(scrape.now - ENDED_SHOWN, ENDED_LIMIT)
        ranks = state.history.workers_by_job([job.job_id for job in jobs])
        nodes = state.submitter.cluster.nodes
        hosts = {node.name for node in nodes}
        open_jobs = [job.job_id for job in jobs if not job.is_terminal]
        of_jobs = (rank for job_id in open_jobs for rank in ranks[job_id])
        running = [rank for rank in of_jobs if rank.state != ProcessState.EXITED]
        return replace(
            scrape,
            is_database_up=True,
            is_coordinated=state.coordinator.absence() is None,
            lease_age_seconds=state.coordinator.lease_age_seconds(),
            statuses=state.jobs.statuses(),
            slots=sum(node.rank_slots or 0 for node in nodes),
            slots_taken=sum(rank.host in hosts for rank in running),
            jobs=[summary(job, ranks[job.job_id], scrape.now) for job in jobs],
        )
    return scrape
