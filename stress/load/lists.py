"""How long one page of a list takes among thousands of finished jobs."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

from sqlalchemy import insert

from api.listing import encode_cursor
from database.engine import Database
from database.records import Job, RankRecord, values_of
from database.tables import JOBS, WORKERS
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid
from stress.load.client import Answer, Connection, port_of
from stress.load.figures import Figure, at_most, none_of, p99_ms
from tests.support.database_samples import NOON, worker
from tests.support.installation import Installation

LIST_GOAL_MS = 50.0

REQUESTS = 300
"""Per figure."""

LIMIT = 50

RANKS = 4

OVER = (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.STOPPED)


def list_figures(root: Path, jobs: int, requests: int = REQUESTS) -> Iterator[Figure]:
    """Time each kind of page, `requests` times."""
    root.mkdir()
    installation = Installation(root)
    installation.start_api()
    try:
        database = Database.open(f"sqlite:///{installation.files.root}/muster.db")
        fill(database, jobs)
        database.close()
        with Connection(port_of(installation.url)) as connection:
            yield from _timed(connection, jobs, requests)
    finally:
        installation.close()


def fill(database: Database, jobs: int) -> None:
    """Store finished jobs, created one second apart."""
    with database.writing() as connection:
        over = [_over(number) for number in range(jobs)]
        connection.execute(insert(JOBS), [values_of(job) for job in over])
        ranks = [values_of(rank) | {"job_id": job.job_id} for job in over for rank in _ranks()]
        connection.execute(insert(WORKERS), ranks)


def _over(number: int) -> Job:
    created = NOON + timedelta(seconds=number)
    return Job(
        job_id=JobId(f"job-{number:06d}"),
        uid=JobUid(f"uid-{number}"),
        spec=JobSpec(world_size=RANKS, name=f"run {number % 100}", labels={"team": "vision"}),
        status=OVER[number % len(OVER)],
        reason=None,
        message=None,
        created_at=created,
        updated_at=created,
        started_at=created,
        finished_at=created + timedelta(minutes=1),
        exit_code=0,
        stop_request=None,
        stop_grace_seconds=None,
        version=7,
    )


def _ranks() -> Iterator[RankRecord]:
    for rank in range(RANKS):
        yield worker(rank, state="exited", process=None, finished=True, step=1000, loss=0.25)


def _timed(connection: Connection, jobs: int, requests: int) -> Iterator[Figure]:
    faults = []
    for path in ("/jobs", "/jobs/summaries"):
        for what, query, whole, page in _queries(jobs):
            asked = f"{path}?limit={LIMIT}{query}"
            answers = [connection.get(asked) for _ in range(requests)]
            faults += [fault for answer in answers if (fault := _fault(answer, whole, page))]
            wait = p99_ms([answer.seconds for answer in answers])
            yield at_most(f"GET {path}?limit={LIMIT}{what}, p99", wait, LIST_GOAL_MS, " ms")
    yield none_of(f"  of {jobs} jobs: wrong pages", faults)


def _queries(jobs: int) -> Iterator[tuple[str, str, int, Sequence[str]]]:
    """Yield label, query string, total number of jobs, and the expected page of each query."""
    stored = [_over(number) for number in range(jobs)]
    newest = [job.job_id for job in reversed(stored)]
    failed = [job.job_id for job in reversed(stored) if job.status is JobStatus.FAILED]
    middle = stored[jobs // 2]
    cursor = encode_cursor((middle.created_at, middle.job_id))
    for what, query, ids in (("", "", newest), (", failed ones", "&status=FAILED", failed)):
        older = [job_id for job_id in ids if job_id < middle.job_id]
        yield what, query, len(ids), ids[:LIMIT]
        yield f"{what}, from the middle", f"{query}&cursor={cursor}", len(ids), older[:LIMIT]


def _fault(answer: Answer, whole: int, page: Sequence[str]) -> str | None:
    if answer.status != 200:
        return f"{answer.status} {answer.body.decode()}"
    total, ids = answer.headers["x-total-count"], [job["job_id"] for job in answer.json()["jobs"]]
    if ids != page:
        return f"{len(ids)} jobs from {ids[:1]}, expected {len(page)} from {page[:1]}"
    return None if total == str(whole) else f"total {total}, expected {whole}"
