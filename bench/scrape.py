"""Processor time and size of a scrape of `/metrics`: ``python bench/scrape.py [scrapes]``.

50 jobs of 20 ranks run as far as the rows tell, then there are 10,000 more that ended long ago. No
coordinator looks at them. Counted is all that the API process does for a request.
"""

import sys
import time
import urllib.request
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from _services import Services, cpu_seconds
from sqlalchemy import insert

from database.engine import Database
from database.records import Job, RankRecord, values_of
from database.tables import JOBS, WORKERS
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid
from muster.contracts.rank import ProcessState, RankProgress
from muster.host.processes import this_process

SCRAPES = 100
RUNNING, RANKS, ENDED = 50, 20, 10_000
GOAL_MS = 50
NOW = datetime.now(UTC)


def main(scrapes: int) -> None:
    with Services(slots=RUNNING * RANKS) as services:
        services.stop_coordinator()
        database = Database.open(services.database_url)
        running = job_rows("run", RUNNING, JobStatus.RUNNING, NOW, None)
        add(database, running, [row for job in running for row in rank_rows(job.job_id)])
        before = measure(services, scrapes)
        show(f"scrape of {RUNNING * RANKS} ranks in {RUNNING} jobs", *before)
        long_ago = NOW - timedelta(days=1)
        ended = job_rows("end", ENDED, JobStatus.COMPLETED, long_ago, long_ago)
        add(database, ended, [row for job in ended for row in rank_rows(job.job_id)[:1]])
        show(f"the same beside {ENDED} jobs that ended", *measure(services, scrapes))
        database.close()


def job_rows(
    name: str, count: int, status: JobStatus, at: datetime, finished_at: datetime | None
) -> list[Job]:
    return [
        Job(
            job_id=JobId(f"{name}-{number}"),
            uid=JobUid(f"{name}-{number}"),
            spec=JobSpec(name=f"training {number}", mode="synchronous", world_size=RANKS),
            status=status,
            created_at=at,
            updated_at=at,
            started_at=at,
            finished_at=finished_at,
        )
        for number in range(count)
    ]


def rank_rows(job_id: JobId) -> list[dict[str, object]]:
    progress = RankProgress(
        step=1000,
        total_steps=100_000,
        epoch=1,
        shard_idx=3,
        line_idx=128,
        loss=0.5,
        metrics={"accuracy": 0.75},
        last_checkpoint_step=995,
        last_checkpoint_bytes=1 << 20,
        last_checkpoint_at=NOW,
    )
    rank = RankRecord(
        rank=0,
        attempt=1,
        state=ProcessState.LIVE,
        process=this_process(),
        progress=progress,
        throughput_steps_per_sec=12.5,
        checkpoints_saved=199,
        last_heartbeat_at=NOW,
        endings={"crash": 1},
    )
    return [values_of(rank) | {"job_id": job_id, "rank": number} for number in range(RANKS)]


def add(database: Database, jobs: Iterable[Job], ranks: list[dict[str, object]]) -> None:
    with database.writing() as connection:
        connection.execute(insert(JOBS), [values_of(job) for job in jobs])
        connection.execute(insert(WORKERS), ranks)


def measure(services: Services, scrapes: int) -> tuple[float, float, int]:
    """Return milliseconds of processor and of wall time a scrape, and its bytes."""
    pid = services.api.pid
    url = f"http://127.0.0.1:{services.port}/metrics"
    for _ in range(3):  # the first ones compile queries
        scrape(url)
    began, before = time.monotonic(), cpu_seconds(pid, with_children=False)
    sizes = [len(scrape(url)) for _ in range(scrapes)]
    spent = cpu_seconds(pid, with_children=False) - before
    wall = time.monotonic() - began
    return 1000 * spent / scrapes, 1000 * wall / scrapes, max(sizes)


def scrape(url: str) -> bytes:
    with urllib.request.urlopen(url) as answer:  # noqa: S310  of this machine
        content: bytes = answer.read()
    return content


def show(what: str, cpu_ms: float, wall_ms: float, size: int) -> None:
    print(f"{what + ', ms of processor time':<62} {cpu_ms:>10.1f}   <= {GOAL_MS}")
    print(f"{'  ms in all; bytes':<62} {wall_ms:>10.1f}; {size}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SCRAPES)
