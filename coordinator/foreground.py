"""One job, run here and now, with no API: ``JOB_ID=… WORLD_SIZE=… python -P -m coordinator``.

The same coordinator over a database of its own, so that everything holds that holds for the
service: ranks are replaced, a second call with the same id after a crash or Ctrl-C goes on.
"""

import asyncio
import sys
import uuid
from collections.abc import Mapping
from typing import Final

import msgspec

from coordinator.service import Service
from muster.contracts.environ import ServiceSettings, spec_from_environment
from muster.contracts.job import JobId, JobStatus, JobUid
from muster.contracts.layout import DataDirectory
from muster.contracts.spec import checked, checked_job_id
from store.database import Database
from store.events import Events
from store.jobs import Jobs
from store.records import Job, Worker
from store.workers import Workers

LOOK_SECONDS: Final = 0.2
PROGRESS_SECONDS: Final = 2.0

EXIT_CODES: Final[Mapping[JobStatus, int]] = {
    JobStatus.COMPLETED: 0,
    JobStatus.FAILED: 1,
    JobStatus.STOPPED: 8,
}
INTERRUPTED: Final = 130


def run(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Run the job that the environment describes to its end; return the exit code.

    Raises a `MusterError` for a job that cannot be described so.
    """
    job_id = checked_job_id(environ["JOB_ID"])
    spec = checked(spec_from_environment(environ))
    own = DataDirectory(settings.data_dir / "foreground" / job_id)
    settings = msgspec.structs.replace(
        settings,
        data_dir=own.root,
        database_url=f"sqlite:///{own.root}/muster.db",
        slots=max(settings.slots, spec.world_size),
    )
    database = Database.open(settings.database_url)
    try:
        jobs = Jobs(database)
        job = jobs.find(job_id)
        if job is not None and job.is_terminal:
            jobs.delete(job_id, job.uid)
            job = None
        if job is None:
            # The same id means: go on from its checkpoints, whoever made them.
            spec = msgspec.structs.replace(spec, resume_from=job_id)
            jobs.create(job_id, JobUid(uuid.uuid4().hex), spec, message=None, idempotency=None)
        return asyncio.run(_Foreground(database, settings, environ, job_id).run())
    finally:
        database.close()


class _Foreground:
    """A service that ends with its one job, and tells how it goes."""

    def __init__(
        self,
        database: Database,
        settings: ServiceSettings,
        environ: Mapping[str, str],
        job_id: JobId,
    ) -> None:
        self._service = Service(database, settings, environ)
        self._jobs = Jobs(database)
        self._workers = Workers(database)
        self._events = Events(database)
        self._job_id = job_id
        self._logs = DataDirectory(settings.data_dir).job(job_id).logs
        self._told = 0

    async def run(self) -> int:
        """Return the exit code of the job: see `EXIT_CODES`."""
        serving = asyncio.ensure_future(self._service.run())
        next_progress = PROGRESS_SECONDS
        looks = 0
        job = self._jobs.get(self._job_id)
        while not serving.done() and not job.is_terminal:
            await asyncio.wait([serving], timeout=LOOK_SECONDS)
            looks += 1
            self._tell_events()
            if looks * LOOK_SECONDS >= next_progress:
                next_progress += PROGRESS_SECONDS
                self._tell_progress()
            job = self._jobs.get(self._job_id)
        self._service.shut_down()
        await serving
        self._tell_events()
        return self._conclude(self._jobs.get(self._job_id))

    def _tell_events(self) -> None:
        for event in self._events.of_job(self._job_id, limit=1000):
            if event.event_id is not None and event.event_id > self._told:
                self._told = event.event_id
                print(f"{event.at:%H:%M:%S}  {event.message}", flush=True)

    def _tell_progress(self) -> None:
        print("  ".join(map(_progress, self._workers.of_job(self._job_id))), flush=True)

    def _conclude(self, job: Job) -> int:
        print(f"logs: {self._logs}", file=sys.stderr)
        if job.is_terminal:
            return EXIT_CODES[job.status]
        print(f"interrupted; the same command goes on with {job.job_id}", file=sys.stderr)
        return INTERRUPTED


def _progress(worker: Worker) -> str:
    loss = "" if worker.loss is None else f" loss {worker.loss:.4f}"
    return f"[{worker.rank}] {worker.step}/{worker.total_steps or '?'}{loss}"
