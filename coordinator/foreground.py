"""One job, run here and now, with no API: ``JOB_ID=… WORLD_SIZE=… python -P -m coordinator``.

The same coordinator over a database of its own, so that everything holds that holds for the
service: ranks are replaced, a second call with the same id after a crash or Ctrl-C goes on.
"""

import asyncio
import itertools
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from coordinator.service import Service
from muster.attic import set_aside
from muster.checkpoints.modes import refuse_other_mode
from muster.completion import complete
from muster.contracts.environ import ServiceSettings, spec_from_environment
from muster.contracts.job import JobId, JobStatus, JobUid
from muster.contracts.layout import DataDirectory, checkpoints_of_job
from muster.contracts.spec_problems import checked, checked_job_id
from muster.remarks import narrate, remark
from store.database import Database
from store.errors import StoreUnavailable
from store.events import Events
from store.jobs import Jobs
from store.records import Worker
from store.workers import Workers

LOOK_SECONDS: Final = 0.2
LOOKS_PER_PROGRESS: Final = 10
EVENTS_LIMIT: Final = 1000

EXIT_CODES: Final[Mapping[JobStatus, int]] = {
    JobStatus.COMPLETED: 0,
    JobStatus.FAILED: 1,
    JobStatus.STOPPED: 8,
}
"""8 is "stopped" in the exit codes of the command line; nobody else is to end with it."""

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
            set_aside(own.job(job_id), job.uid)  # files before rows: either may be cut short
            jobs.delete(job_id, job.uid)
            job = None
        if job is None:
            # The same id means: go on from its checkpoints, whoever made them.
            spec = msgspec.structs.replace(spec, resume_from=job_id)
            completed = complete(spec, settings, Path.cwd())
            earlier = checkpoints_of_job(completed.checkpoint_dir, job_id)
            refuse_other_mode(earlier, completed.spec.mode)
            jobs.create(
                job_id,
                JobUid(uuid.uuid4().hex),
                completed.spec,
                message=completed.note,
                idempotency=None,
            )
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
        self._job = self._jobs.get(job_id)
        self._logs = DataDirectory(settings.data_dir).job(job_id).logs
        self._told = 0

    async def run(self) -> int:
        """Return the exit code of the job: see `EXIT_CODES`."""
        serving = asyncio.ensure_future(self._service.run())
        for look in itertools.count(1):
            if serving.done() or self._job.is_terminal:
                break
            await asyncio.wait([serving], timeout=LOOK_SECONDS)
            await self._look()
            if look % LOOKS_PER_PROGRESS == 0:
                await self._tell_progress()
        self._service.shut_down()
        await serving
        await self._look()
        return self._conclude()

    async def _look(self) -> None:
        """Learn how the job is and tell what happened; not while the database is away."""
        with suppress(StoreUnavailable):
            job_id = self._job.job_id
            events = await asyncio.to_thread(self._events.of_job, job_id, EVENTS_LIMIT)
            for event in events:
                if event.event_id is not None and event.event_id > self._told:
                    self._told = event.event_id
                    narrate(f"{event.at:%H:%M:%S}  {event.message}")
            self._job = await asyncio.to_thread(self._jobs.get, job_id)

    async def _tell_progress(self) -> None:
        with suppress(StoreUnavailable):
            workers = await asyncio.to_thread(self._workers.of_job, self._job.job_id)
            narrate("  ".join(map(_progress, workers)))

    def _conclude(self) -> int:
        remark(f"logs: {self._logs}")
        if self._job.is_terminal:
            return EXIT_CODES[self._job.status]
        remark(f"interrupted; the same command goes on with {self._job.job_id}")
        return INTERRUPTED


def _progress(worker: Worker) -> str:
    loss = "" if worker.loss is None else f" loss {worker.loss:.4f}"
    return f"[{worker.rank}] {worker.step}/{worker.total_steps or '?'}{loss}"
