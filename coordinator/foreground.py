"""One job, run here and now without an API: by ``muster run``, or by hand.

``JOB_ID=… WORLD_SIZE=… python -P -m coordinator`` runs the job that the environment describes. It
is the coordinator of the service over a database of its own: ranks are replaced, and a second call
with the same id after a crash or Ctrl-C resumes the job.
"""

import asyncio
import itertools
import signal
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol

import msgspec

from coordinator.service import Service
from database.engine import Database
from database.errors import DatabaseUnavailable
from database.history import History
from database.jobs import Jobs, NewJob
from database.records import Event, Job, RankRecord
from muster.checkpoints.listing import refuse_other_mode
from muster.contracts.environ import read_fields, spec_from_environment
from muster.contracts.errors import JobDiffers
from muster.contracts.job import EXIT_CODES, JobId, JobUid
from muster.contracts.paths import DataDir, JobFiles, checkpoints_of_job
from muster.contracts.retry import INTERRUPTED_CODE
from muster.contracts.secrets import SHARED_VARIABLES
from muster.contracts.settings import ServiceSettings
from muster.contracts.spec import JobSpec
from muster.contracts.spec_problems import checked, checked_job_id
from muster.host.limits import ShellLimits
from muster.host.private import make_private
from muster.job_defaults import complete
from muster.runtime.archive import archive_files
from muster.runtime.stderr_messages import print_stderr, print_stdout

LOOK_SECONDS: Final = 0.2
LOOKS_PER_PROGRESS: Final = 10
EVENTS_LIMIT: Final = 1000

LAST_OUTPUT_SECONDS: Final = 2.0
"""How long a terminal that does not read is waited for once the user wants an end."""

ENDING: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Each acts like Ctrl-C, as there is no service to hand over to. SIGHUP: the terminal closed."""

_DATA_PLACES: Final = ("dataset_dir", "checkpoint_dir")


class Display(Protocol):
    """Shows how a job goes. The methods are called from a thread of their own and may block.

    A method that a subclass leaves out shows nothing.
    """

    def show_output(self) -> None:
        """Show what the ranks have printed; called often."""

    def show_rest(self) -> None:
        """Show everything that is left when all is over."""

    def show_event(self, event: Event) -> None:
        """Show an event."""

    def show_progress(self, workers: Sequence[RankRecord]) -> None:
        """Show the progress of the ranks."""

    def show_end(self, job: Job) -> None:
        """Show how the job ended, or that it was interrupted."""


class EventPrinter(Display):
    """Prints events and progress; the output of the ranks is in their logs."""

    def __init__(self, files: JobFiles) -> None:
        self._files = files

    def show_event(self, event: Event) -> None:
        print_stdout(f"{event.at:%H:%M:%S}  {event.message}")

    def show_progress(self, workers: Sequence[RankRecord]) -> None:
        facts = []
        for worker in workers:
            at = worker.progress
            loss = "" if at.loss is None else f" loss {at.loss:.4f}"
            facts.append(f"[{worker.rank}] {at.step}/{at.total_steps or '?'}{loss}")
        print_stdout("  ".join(facts))

    def show_end(self, job: Job) -> None:
        print_stderr(f"logs: {self._files.logs}")
        if not job.is_terminal:
            print_stderr(f"interrupted; the same command resumes {job.job_id}")


def run(settings: ServiceSettings, environ: Mapping[str, str]) -> int:
    """Run the job that the environment describes to its end; return the exit code.

    Raises a `MusterError` if the environment does not describe a valid job.
    """
    job_id = checked_job_id(environ["JOB_ID"])
    spec = checked(spec_from_environment(environ))
    return play(job_id, spec, settings, environ, EventPrinter)


def play(
    job_id: JobId,
    spec: JobSpec,
    settings: ServiceSettings,
    environ: Mapping[str, str],
    display: Callable[[JobFiles], Display],
) -> int:
    """Run a job to its end; return its exit code (`EXIT_CODES`).

    An unfinished job of that id is resumed. `display` is called once the place of the job's files
    is known. Raises `JobDiffers` if the unfinished job has another spec, a `DatabaseError` if a
    concurrent call was faster, `UnusableDirectory`, and what `complete` and `refuse_other_mode`
    raise.
    """
    limits = ShellLimits.replaced()
    make_private(settings.data_dir)
    data = DataDir(settings.data_dir / "foreground" / job_id)
    settings = msgspec.structs.replace(
        settings,
        data_dir=data.root,
        database_url=f"sqlite:///{data.root}/muster.db",
        slots=max(settings.slots, spec.world_size),
        agent_address=None,  # a service may listen there
        # By hand the default is ./checkpoints, as for a script that runs alone.
        checkpoint_dir=read_fields(ServiceSettings, environ)["checkpoint_dir"],
    )
    # Only this user submits jobs here, so the program may see the whole environment.
    environ = {name: value for name, value in environ.items() if name != SHARED_VARIABLES}
    database = Database.open(settings.database_url)
    try:
        # An earlier run has shown the events that are there.
        last = History(database).events(job_id, 1)
        shown = (last[0].event_id or 0) if last else 0
        _store(Jobs(database), job_id, spec, settings)
        service = Service(database, settings, environ, limits)
        foreground = _Foreground(database, service, job_id, display(data.job(job_id)), shown)
        job = asyncio.run(foreground.run())
    finally:
        database.close()
    return EXIT_CODES.get(job.status, INTERRUPTED_CODE)


def _store(jobs: Jobs, job_id: JobId, spec: JobSpec, settings: ServiceSettings) -> None:
    """Store the job, unless an unfinished one of that id exists."""
    # By hand, the same id means: resume from its checkpoints.
    completed = complete(msgspec.structs.replace(spec, resume_from=job_id), settings, Path.cwd())
    job = jobs.find(job_id)
    if job is not None and not job.is_terminal:
        _refuse_other_spec(job, spec, completed.spec)
        return
    if job is not None:
        # Files before rows: either may be interrupted.
        with jobs.keeping(job.job_id, job.uid):
            archive_files(DataDir(settings.data_dir).job(job_id), job.uid)
        jobs.delete(job.job_id, job.uid)
    earlier = checkpoints_of_job(completed.checkpoint_dir, job_id)
    refuse_other_mode(earlier, completed.spec.mode)
    uid = JobUid(uuid.uuid4().hex)
    jobs.create(NewJob(job_id, uid, completed.spec, completed.note))


def _refuse_other_spec(job: Job, asked: JobSpec, completed: JobSpec) -> None:
    """Raise `JobDiffers` if the job has another spec; places chosen for it do not count."""
    # A pause after each step has no effect on the result, so a resumed job may have another one.
    kept = {place for place in _DATA_PLACES if getattr(asked, place) is None} | {"sleep_sec"}
    others = [
        field
        for field in JobSpec.__struct_fields__
        if field not in kept and getattr(job.spec, field) != getattr(completed, field)
    ]
    if others:
        raise JobDiffers(job.job_id, others)


class _Writer:
    """Runs display calls in one daemon thread, which a terminal that does not read may block."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[tuple[Callable[[], None], asyncio.Future[None]]]()
        self._last: asyncio.Future[None] | None = None
        threading.Thread(target=self._run, name="writer", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        return self._last is None or self._last.done()

    def submit(self, show: Callable[[], None]) -> None:
        self._last = asyncio.get_running_loop().create_future()
        self._calls.put((show, self._last))

    async def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when everything submitted was shown, or after the timeout."""
        if self._last is not None:
            await asyncio.wait([self._last], timeout=timeout_seconds)

    def _run(self) -> None:
        reported = ""
        while True:
            show, shown = self._calls.get()
            try:
                show()
            except Exception as error:  # noqa: BLE001  a broken display must not end the job
                if repr(error) != reported:
                    reported = repr(error)
                    print_stderr(f"cannot show output ({reported}); the job goes on, see its logs")
            with suppress(RuntimeError):  # the event loop has ended
                shown.get_loop().call_soon_threadsafe(shown.set_result, None)


class _Foreground:
    """A service that ends with its one job, and shows how that goes."""

    def __init__(
        self, database: Database, service: Service, job_id: JobId, display: Display, shown: int
    ) -> None:
        """`shown` is the id of the last event that was shown already."""
        self._service = service
        self._jobs = Jobs(database)
        self._history = History(database)
        self._job = self._jobs.get(job_id)
        self._display = display
        self._shown = shown
        self._writer = _Writer()
        self._end_requested = asyncio.Event()

    async def run(self) -> Job:
        """Return the job as it is in the end; it is not terminal if it was interrupted."""
        serving = asyncio.ensure_future(self._service.run())
        await asyncio.sleep(0)  # the service sets its signal handlers, then we replace them
        for number in (signal.SIGINT, *ENDING):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                asyncio.get_running_loop().add_signal_handler(number, self._end)
        for look in itertools.count(1):
            if serving.done() or self._job.is_terminal:
                break
            await asyncio.wait([serving], timeout=LOOK_SECONDS)
            await self._look(with_progress=look % LOOKS_PER_PROGRESS == 0)
        self._service.shut_down()
        await serving
        await self._look()
        await self._conclude()
        return self._job

    def _end(self) -> None:
        self._end_requested.set()
        self._service.shut_down()

    async def _look(self, *, with_progress: bool = False) -> None:
        """Show what is new, if the terminal reads, and learn how the job is."""
        with suppress(DatabaseUnavailable):
            if self._writer.is_idle:
                # What a rank has printed comes before the event of its end.
                self._writer.submit(self._display.show_output)
                await self._show_events()
                if with_progress:
                    workers = await asyncio.to_thread(self._history.ranks, self._job.job_id)
                    self._writer.submit(partial(self._display.show_progress, workers))
                await self._writer.wait(LOOK_SECONDS)
            self._job = await asyncio.to_thread(self._jobs.get, self._job.job_id)

    async def _show_events(self) -> bool:
        """Show the next events; return whether there were any."""
        following, job_id = self._history.events, self._job.job_id
        events = await asyncio.to_thread(following, job_id, EVENTS_LIMIT, self._shown)
        for event in events:
            self._shown = event.event_id or self._shown
            self._writer.submit(partial(self._display.show_event, event))
        return bool(events)

    async def _conclude(self) -> None:
        """Show what is left, and how the job ended; not for long once the user wants an end."""
        self._writer.submit(self._display.show_rest)
        with suppress(DatabaseUnavailable):
            while await self._show_events():
                pass
        self._writer.submit(partial(self._display.show_end, self._job))
        shown = asyncio.ensure_future(self._writer.wait())
        ended = asyncio.ensure_future(self._end_requested.wait())
        await asyncio.wait([shown, ended], return_when=asyncio.FIRST_COMPLETED)
        if not shown.done():
            await self._writer.wait(LAST_OUTPUT_SECONDS)
        if not self._writer.is_idle:
            writer = _Writer()  # the other one is blocked, and left behind
            writer.submit(partial(self._display.show_end, self._job))
            await writer.wait(LAST_OUTPUT_SECONDS)
        shown.cancel()
        ended.cancel()
