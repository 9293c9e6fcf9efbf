"""One job, run here and now, with no API: by ``muster run``, or by hand.

``JOB_ID=… WORLD_SIZE=… python -P -m coordinator`` runs what the environment describes. It is the
same coordinator over a database of its own, so that everything holds that holds for the service:
ranks are replaced, a second call with the same id after a crash or Ctrl-C goes on.
"""

import asyncio
import itertools
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec

from coordinator.attention import Attention
from coordinator.service import Service
from muster.attic import set_aside
from muster.checkpoints.modes import refuse_other_mode
from muster.completion import complete
from muster.contracts.endings import INTERRUPTED_CODE
from muster.contracts.environ import ServiceSettings, spec_from_environment
from muster.contracts.errors import BegunOtherwise
from muster.contracts.job import EXIT_CODES, JobId, JobUid
from muster.contracts.layout import DataDirectory, JobFiles, checkpoints_of_job
from muster.contracts.secrets import LENT
from muster.contracts.spec import JobSpec
from muster.contracts.spec_problems import checked, checked_job_id
from muster.descriptors import DescriptorLimits
from muster.remarks import narrate, remark
from store.database import Database
from store.errors import JobExists, JobMissing, StoreUnavailable
from store.events import Events
from store.jobs import Jobs
from store.records import Event, Job, Worker
from store.workers import Workers

LOOK_SECONDS: Final = 0.2
LOOKS_PER_PROGRESS: Final = 10
EVENTS_LIMIT: Final = 1000

FAREWELL_SECONDS: Final = 3.0
"""For whoever does not look or hear, once somebody has asked for an end: it is for them to wait."""

LAST_WORDS_SECONDS: Final = 1.0
"""Of these, what is kept for those who hear the conclusion while somebody does not look."""

ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Each is a Ctrl-C, as nobody is there to hand over to. SIGHUP: the terminal has been closed."""

_PLACES_OF_DATA: Final = ("dataset_dir", "checkpoint_dir")
_PAUSE: Final = "sleep_sec"
"""For demonstrations, and of no effect on the result: who goes on without it means the same job."""


class Audience(Protocol):
    """Who is shown how a job goes. Nothing of this raises, all of it may take for ever.

    What is seen and what is heard come from a thread each.
    """

    def look(self) -> None:
        """See whatever else there is to see: often."""

    def see_rest(self) -> None:
        """See everything that is left, when all is over."""

    def miss_rest(self) -> None:
        """Learn that there was no time to see it: before the conclusion."""

    def hear(self, event: Event) -> None:
        """Learn what has happened."""

    def note(self, workers: Sequence[Worker]) -> None:
        """Learn how far everybody is."""

    def conclude(self, job: Job) -> None:
        """Learn how it ended, or that it was interrupted."""


class Narrator:
    """Tells all that happens on standard output; what ranks print is in their logs."""

    def __init__(self, files: JobFiles) -> None:
        self._files = files

    def look(self) -> None:
        """Everything it tells is heard."""

    def see_rest(self) -> None:
        """Likewise."""

    def miss_rest(self) -> None:
        """Likewise."""

    def hear(self, event: Event) -> None:
        narrate(f"{event.at:%H:%M:%S}  {event.message}")

    def note(self, workers: Sequence[Worker]) -> None:
        narrate("  ".join(map(_progress, workers)))

    def conclude(self, job: Job) -> None:
        remark(f"logs: {self._files.logs}")
        if not job.is_terminal:
            remark(f"interrupted; the same command goes on with {job.job_id}")


def run(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Run the job that the environment describes to its end; return the exit code.

    Raises a `MusterError` for a job that cannot be described so.
    """
    job_id = checked_job_id(environ["JOB_ID"])
    spec = checked(spec_from_environment(environ))
    return play(job_id, spec, settings, environ, Narrator)


def play(
    job_id: JobId,
    spec: JobSpec,
    settings: ServiceSettings,
    environ: Mapping[str, str],
    audience: Callable[[JobFiles], Audience],
) -> int:
    """Run a job to its end; return its exit code: see `EXIT_CODES`.

    One of that id that is not over goes on. `audience` is called once it is known where its files
    are. Raises `BegunOtherwise`, `TooFewDescriptors`, and what `complete` and
    `refuse_other_mode` do.
    """
    limits = DescriptorLimits.raised()
    limits.refuse_too_many(spec.world_size)
    own = DataDirectory(settings.data_dir / "foreground" / job_id)
    settings = msgspec.structs.replace(
        settings,
        data_dir=own.root,
        database_url=f"sqlite:///{own.root}/muster.db",
        slots=max(settings.slots, spec.world_size),
    )
    # Nobody else submits jobs here: whatever the person has the program may have.
    environ = {name: value for name, value in environ.items() if name != LENT}
    database = Database.open(settings.database_url)
    try:
        told = _newest_event(database, job_id)
        _store(Jobs(database), job_id, spec, settings)
        shown = audience(own.job(job_id))
        service = Service(database, settings, environ, limits)
        job = asyncio.run(_Foreground(database, service, job_id, shown, told).run())
    finally:
        database.close()
    return EXIT_CODES.get(job.status, INTERRUPTED_CODE)


def _newest_event(database: Database, job_id: JobId) -> int:
    """Return the id of the last event of the job so far; an earlier run has told it."""
    return max((event.event_id or 0 for event in Events(database).of_job(job_id, 1)), default=0)


def _store(jobs: Jobs, job_id: JobId, spec: JobSpec, settings: ServiceSettings) -> None:
    """Store the job, unless it is there and not over."""
    # The same id means: go on from its checkpoints, whoever made them.
    completed = complete(msgspec.structs.replace(spec, resume_from=job_id), settings, Path.cwd())
    job = jobs.find(job_id)
    if job is not None and not job.is_terminal:
        _refuse_another(job, spec, completed.spec)
        return
    if job is not None:
        _clear_away(jobs, job, DataDirectory(settings.data_dir).job(job_id))
    earlier = checkpoints_of_job(completed.checkpoint_dir, job_id)
    refuse_other_mode(earlier, completed.spec.mode)
    try:
        jobs.create(
            job_id,
            JobUid(uuid.uuid4().hex),
            completed.spec,
            message=completed.note,
            idempotency=None,
        )
    except JobExists:  # another call of the same moment was faster: this one goes on with its job
        _refuse_another(jobs.get(job_id), spec, completed.spec)


def _clear_away(jobs: Jobs, job: Job, files: JobFiles) -> None:
    """Make room for another job in the place of one that is over, and keep that one's files."""
    with suppress(JobMissing):  # another call of the same moment was faster: the files are its own
        # Files before rows: either may be cut short.
        with jobs.keeping(job.job_id, job.uid):
            set_aside(files, job.uid)
        jobs.delete(job.job_id, job.uid)


def _refuse_another(job: Job, asked: JobSpec, completed: JobSpec) -> None:
    """Raise `BegunOtherwise` if the job is not what is asked for; it keeps data chosen for it."""
    kept = {place for place in _PLACES_OF_DATA if getattr(asked, place) is None} | {_PAUSE}
    others = [
        field
        for field in JobSpec.__struct_fields__
        if field not in kept and getattr(job.spec, field) != getattr(completed, field)
    ]
    if others:
        raise BegunOtherwise(job.job_id, others)


class _Foreground:
    """A service that ends with its one job, and shows how it goes."""

    def __init__(
        self,
        database: Database,
        service: Service,
        job_id: JobId,
        audience: Audience,
        told: int,
    ) -> None:
        """`told` is the last event that somebody has heard of."""
        self._service = service
        self._jobs = Jobs(database)
        self._workers = Workers(database)
        self._events = Events(database)
        self._job = self._jobs.get(job_id)
        self._audience = audience
        self._told = told
        # Apart from each other: what is shown may be held up where what is said is not.
        self._sight = Attention()
        self._hearing = Attention()
        self._asked_to_end = asyncio.Event()
        self._leave_at: float | None = None

    async def run(self) -> Job:
        """Return the job as it is in the end; it is not over if it was interrupted."""
        serving = asyncio.ensure_future(self._service.run())
        await asyncio.sleep(0)  # now it answers signals
        for number in (signal.SIGINT, *ENDING):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                asyncio.get_running_loop().add_signal_handler(number, self._end)
        for look in itertools.count(1):
            if serving.done() or self._job.is_terminal:
                break
            await asyncio.wait([serving], timeout=LOOK_SECONDS)
            await self._look()
            if look % LOOKS_PER_PROGRESS == 0:
                await self._note_progress()
        self._service.shut_down()
        await serving
        await self._look()
        await self._conclude()
        return self._job

    def _end(self) -> None:
        self._asked_to_end.set()
        self._service.shut_down()

    async def _look(self) -> None:
        """Learn how the job is and show what happened."""
        if self._sight.is_free:
            self._sight.begin(self._audience.look)
        # What a rank printed comes before the news of its end, if anybody sees it soon.
        await self._sight.wait(LOOK_SECONDS)
        if self._hearing.is_free:
            await self._tell_news()
            await self._hearing.wait(LOOK_SECONDS)
        with suppress(StoreUnavailable):
            self._job = await asyncio.to_thread(self._jobs.get, self._job.job_id)

    async def _tell_news(self) -> bool:
        """Begin to tell what has happened; return whether there was any news that can be had."""
        following, job_id = self._events.following, self._job.job_id
        try:
            news = await asyncio.to_thread(following, job_id, self._told, EVENTS_LIMIT)
        except StoreUnavailable:
            return False
        for event in news:
            self._told = event.event_id or self._told
            self._hearing.begin(partial(self._audience.hear, event))
        return bool(news)

    async def _note_progress(self) -> None:
        if self._hearing.is_free:
            with suppress(StoreUnavailable):
                workers = await asyncio.to_thread(self._workers.of_job, self._job.job_id)
                self._hearing.begin(partial(self._audience.note, workers))

    async def _conclude(self) -> None:
        """Show what is left, and how it ended."""
        self._sight.begin(self._audience.see_rest)
        await self._patiently(self._sight, kept_seconds=LAST_WORDS_SECONDS)
        while await self._tell_news():  # all that has gathered while nobody heard
            pass
        if not self._sight.is_free:
            self._hearing.begin(self._audience.miss_rest)
        self._hearing.begin(partial(self._audience.conclude, self._job))
        await self._patiently(self._hearing, kept_seconds=0.0)
        self._sight.leave()
        self._hearing.leave()

    async def _patiently(self, attention: Attention, kept_seconds: float) -> None:
        """Wait until all was seen; once somebody has asked for an end, not for long.

        The end of patience is one for sight and hearing, `kept_seconds` before it for this one:
        with ``2>&1 | less`` both are held up.
        """
        seen = asyncio.ensure_future(attention.wait())
        asked = asyncio.ensure_future(self._asked_to_end.wait())
        await asyncio.wait([seen, asked], return_when=asyncio.FIRST_COMPLETED)
        seen.cancel()
        asked.cancel()
        if self._asked_to_end.is_set():
            now = asyncio.get_running_loop().time()
            if self._leave_at is None:
                self._leave_at = now + FAREWELL_SECONDS
            await attention.wait(max(0.0, self._leave_at - kept_seconds - now))


def _progress(worker: Worker) -> str:
    loss = "" if worker.loss is None else f" loss {worker.loss:.4f}"
    return f"[{worker.rank}] {worker.step}/{worker.total_steps or '?'}{loss}"
