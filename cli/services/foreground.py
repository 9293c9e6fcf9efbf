"""One job with services of its own, from its start to its end.

They are those of `muster up`, in a data directory of the job, and end with this process however
that ends. The job is submitted and followed over HTTP. Ranks print on standard output; what happens
to them is printed on standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import urlsplit

import msgspec

from cli.connection import ATTACHED_SECONDS
from cli.output import ROUTINE_EVENTS, Tracebacks, say
from cli.services.processes import END_SIGNALS, ServicePair, failed_start
from cli.services.record import (
    ServiceRecord,
    open_for_append,
    service_lock,
    service_settings,
    write_record,
)
from muster.client.errors import ClientError, Conflict, NotFound
from muster.contracts.errors import JobDiffers
from muster.contracts.job.retry import INTERRUPTED_CODE
from muster.contracts.job.secrets import SHARED_VARIABLES
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import EXIT_CODES, JobId, JobStatus
from muster.contracts.settings.paths import DataDir, JobFiles
from muster.contracts.settings.services import (
    CLUSTER,
    DEFAULT_HOST,
    TOKEN,
    AccessSettings,
    ServiceSettings,
    local_url,
)
from muster.contracts.settings.variables import read_fields, variables_of
from muster.contracts.views.history import EventView
from muster.contracts.views.job import JobView
from muster.host.files import rotate
from muster.host.limits import ShellLimits
from muster.host.ports import free_port
from muster.host.private import make_private
from muster.host.processes import this_process
from muster.logs.local import LocalLogs
from muster.logs.source import decode

if TYPE_CHECKING:
    from muster.client import Client, Job

OWN_MESSAGES: Final = {"job_stopping": "interrupted; ranks checkpoint and exit", "job_queued": ""}
"""In place of messages that speak of a service."""

CHUNK_BYTES: Final = 16 << 20
"""Shown at once, so that a rank that prints without end does not hold up the messages."""

LOOK_SECONDS: Final = 0.05
LOOKS_PER_REQUEST: Final = 4
"""Logs are files of this machine, so looking at them is cheap."""

CONNECT_PAUSE_SECONDS: Final = 0.01

LAST_OUTPUT_SECONDS: Final = 2.0
"""How long a terminal that does not read is waited for once the user wants an end."""

ONE_REQUEST_SECONDS: Final = 1.0
"""Signals within this time are one request: `timeout` and schedulers signal a process and then its
group."""

FINISHED: Final = (JobStatus.COMPLETED, JobStatus.FAILED)
"""Not STOPPED, which a second Ctrl-C leads to, nor QUEUED, as after the first one."""

LEFT_OVER: Final = "/problems/checkpoints-left-over"


def run_job(job_id: JobId, spec: JobSpec) -> int:
    """Run a job to its end; return 0 if it completed, 1 if it failed, 130 if it was interrupted.

    An unfinished job of that id is resumed. Raises `JobDiffers` if that has another spec, a
    `ClientError` if the job is refused, and a `MusterError` if the services do not start.
    """
    settings = service_settings()
    limits = ShellLimits.replaced()
    make_private(settings.data_dir)
    files = DataDir(settings.data_dir).foreground(job_id)
    is_new = not files.root.exists()
    with service_lock(files, "wait until that one has ended, or choose another --job-id"):
        environ = private_environment(os.environ, files.root, max(settings.slots, spec.world_size))
        files.ended.unlink(missing_ok=True)
        url = local_url(environ)
        log = str(files.services_log)
        record = ServiceRecord(url=url, process=this_process(), log=log, is_ending=False)
        write_record(files, record)
        rotate(files.services_log)
        with open_for_append(files, files.services_log) as output:
            follower = Follower(job_id, spec, files)
            try:
                view = asyncio.run(_serve(environ, output, limits, follower, is_new=is_new))
            finally:
                files.disk_reserve.unlink(missing_ok=True)
    if view is None or view.status not in FINISHED:
        return INTERRUPTED_CODE
    files.ended.touch()
    return EXIT_CODES[JobStatus(view.status)]


def private_environment(environ: Mapping[str, str], root: Path, slots: int) -> dict[str, str]:
    """Return the environment of services that this process alone uses."""
    access = {variable.name for variable, _ in variables_of(AccessSettings).values()}
    # Ranks may see all variables, as only this user submits jobs here.
    left_out = {*access, SHARED_VARIABLES, CLUSTER, "MUSTER_AGENT_ADDRESS", "JOB_ID"}
    return {
        **{name: value for name, value in environ.items() if name not in left_out},
        # By hand the default is ./checkpoints, as for a script that runs alone.
        "CHECKPOINT_DIR": str(read_fields(ServiceSettings, environ)["checkpoint_dir"]),
        "MUSTER_DATA_DIR": str(root),
        "MUSTER_DATABASE_URL": "",
        "MUSTER_HOST": DEFAULT_HOST,
        "MUSTER_PORT": str(free_port()),
        "MUSTER_SLOTS": str(slots),
        TOKEN: secrets.token_hex(),
    }


async def _serve(
    environ: Mapping[str, str],
    output: BinaryIO,
    limits: ShellLimits,
    follower: Follower,
    *,
    is_new: bool,
) -> JobView | None:
    """Run the services until the job is over or a signal; return the job as it is then."""
    log_offset = output.tell()
    # A coordinator would go on with an unfinished job before that is compared with this one.
    services = ServicePair(environ, output, limits, is_coordinator_held=not is_new)
    start = partial(asyncio.get_running_loop().call_soon_threadsafe, services.start_coordinator)
    connect = partial(_connect, local_url(environ), environ[TOKEN])
    following = _in_thread(partial(follower.run, connect, start, services.mark_served))
    signals: asyncio.Queue[float] = asyncio.Queue()
    _call_at_signals(lambda: signals.put_nowait(time.monotonic()))
    pair = (services.api, services.coordinator)
    first_signal = asyncio.ensure_future(signals.get())
    any_of: list[asyncio.Future[Any]] = [*pair, following, first_signal]
    await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
    have_failed = any(task.done() for task in pair)
    if not (following.done() or have_failed):
        await _interrupt(services, follower, following, signals, await first_signal)
    # Nothing is left to be saved.
    await asyncio.gather(services.end_coordinator(), services.end_api())
    _ignore_signals()
    if have_failed:
        raise failed_start(follower.files, log_offset)
    if following.done():
        following.result()
    # Without a job it was interrupted before that was submitted.
    return None if follower.job is None else follower.job.view


async def _interrupt(
    services: ServicePair,
    follower: Follower,
    following: asyncio.Future[None],
    signals: asyncio.Queue[float],
    first_at: float,
) -> None:
    """Let the ranks save and exit, or kill them at the next signal; then show the end."""
    killing = asyncio.create_task(_kill_ranks_at(signals, follower, first_at))
    await services.end_coordinator()
    killing.cancel()
    follower.is_over.set()
    await asyncio.wait([following], timeout=LAST_OUTPUT_SECONDS)
    if not following.done() and follower.job is not None:
        await asyncio.to_thread(follower.job.refresh)
        await asyncio.wait([_in_thread(follower.show_end)], timeout=LAST_OUTPUT_SECONDS)


async def _kill_ranks_at(
    signals: asyncio.Queue[float], follower: Follower, first_at: float
) -> None:
    while True:
        if await signals.get() >= first_at + ONE_REQUEST_SECONDS:
            await asyncio.to_thread(follower.kill_ranks)


def _connect(url: str, token: str) -> Client:
    """Return a client of the API once that listens; it stays open until this process ends."""
    from muster.client import Client  # noqa: PLC0415  while the services start

    address = DEFAULT_HOST, urlsplit(url).port
    while True:  # a request would be repeated after longer pauses
        with suppress(OSError), socket.create_connection(address):
            return Client(url, token, retry_seconds=ATTACHED_SECONDS)
        time.sleep(CONNECT_PAUSE_SECONDS)


def _call_at_signals(function: Callable[[], None]) -> None:
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            asyncio.get_running_loop().add_signal_handler(number, function)


def _ignore_signals() -> None:
    """The exit code is known now: Python would be killed if Ctrl-C came while it shuts down."""
    for number in END_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """Call `function` in a daemon thread: a terminal that does not read may block it for ever."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001  raised where the future is awaited
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name="follower", daemon=True).start()
    return asyncio.wrap_future(ended)


class Follower:
    """Submits one job and shows how it goes."""

    def __init__(self, job_id: JobId, spec: JobSpec, files: DataDir) -> None:
        """Create it before the services start: what a resumed job does then is new."""
        self.files = files
        self._job_files = files.job(job_id)
        self._body = msgspec.json.decode(msgspec.json.encode(spec)) | {
            "job_id": job_id,
            "working_dir": str(Path.cwd() / (spec.working_dir or "")),
        }
        self._terminal = Terminal(self._job_files)
        self._warnings = ServiceWarnings(files.services_log)
        self._began = datetime.now(UTC)
        self._last_event = 0
        self.job: Job | None = None
        self.is_over = threading.Event()
        """Set when no service works for the job any more."""

    def run(
        self,
        connect: Callable[[], Client],
        on_submitted: Callable[[], object],
        on_served: Callable[[], None],
    ) -> None:
        """Return once the job is over and everything was shown.

        `on_submitted` starts a coordinator; `on_served` is called once that has started the job.
        """
        job = self.job = self.submit(connect())
        on_submitted()
        for look in count():
            # What a rank has printed comes before the event of its end.
            self._terminal.show_output()
            if look % LOOKS_PER_REQUEST == 0:
                self._show_events(job)
                self._warnings.show()
                if job.refresh().is_terminal:
                    break
                if job.status != JobStatus.QUEUED:
                    on_served()
            if self.is_over.wait(LOOK_SECONDS):
                job.refresh()
                break
        self._terminal.show_rest()
        self._show_events(job)
        self.show_end()

    def kill_ranks(self) -> None:
        """End the ranks at once; called in another thread."""
        if self.job is not None:
            with suppress(ClientError):  # the job or the API has just ended
                self.job.stop(grace_seconds=0)

    def show_end(self) -> None:
        if self.job is not None:
            self._terminal.show_end(self.job.view)

    def submit(self, client: Client) -> Job:
        """Submit the job, unless an unfinished one of that id exists."""
        with suppress(NotFound):
            job = client.named(self._body["job_id"])
            if not job.is_terminal:
                self._refuse_other_spec(job.view)
                return job
            job.delete(delete_logs=False)
            self._terminal = Terminal(self._job_files)
        try:
            return client.submit(self._body)
        except Conflict as conflict:
            if conflict.type != LEFT_OVER:
                raise
        # By hand, the same id means: resume from its checkpoints.
        return client.submit(self._body, resume_from=self._body["job_id"])

    def _refuse_other_spec(self, stored: JobView) -> None:
        """Raise `JobDiffers` if the job has another spec; places chosen for it do not count."""
        places = {it for it in ("dataset_dir", "checkpoint_dir") if self._body[it] is None}
        # A pause after each step has no effect on the result, so a resumed job may have another.
        kept = {*places, "job_id", "resume_from", "sleep_sec"}
        others = [it for it in self._body if it not in kept and self._body[it] != stored.spec[it]]
        if others:
            raise JobDiffers(stored.job_id, others)

    def _show_events(self, job: Job) -> None:
        while page := job.events(after=self._last_event):
            self._last_event = page[-1].event_id or self._last_event
            for event in page:
                if event.at >= self._began:  # an earlier run has shown the others
                    self._terminal.show_event(event)


class ServiceWarnings:
    """Prints what the services warn of, each once: a full disk lets no event be written."""

    def __init__(self, log: Path) -> None:
        """What the log holds already is from an earlier run."""
        self._log = log
        self._offset = log.stat().st_size if log.exists() else 0
        self._shown: set[str] = set()

    def show(self) -> None:
        with self._log.open("rb") as log:
            log.seek(self._offset)
            lines, end, _ = log.read(CHUNK_BYTES).rpartition(b"\n")
        self._offset += len(lines + end)
        for line in lines.splitlines():
            with suppress(ValueError):  # a traceback
                entry = json.loads(line)
                text = ": ".join(it for it in (entry["event"], entry.get("error")) if it)
                if entry["level"] != "info" and text not in self._shown:
                    self._shown.add(text)
                    say(text)


def print_lines(lines: str) -> None:
    """Print what ranks wrote.

    If the reader goes away (``muster run … | head``), the job goes on and one message says so.
    """
    try:
        print(lines, flush=True)
    except OSError as error:
        # As Python's documentation advises: what is still buffered, and all to come, goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"what ranks print is only in their logs from now on ({error})")


class Terminal:
    """Shows what ranks print and what happens to them.

    Ranks write to files, so no rank waits for a slow terminal.
    """

    def __init__(self, files: JobFiles, write: Callable[[str], None] = print_lines) -> None:
        """`write` receives one or several lines. Lines that the logs hold already are skipped."""
        self._files = files
        self._write = write
        self._tracebacks = Tracebacks()
        logs = LocalLogs(files)
        self._follower = logs.follow(None, logs.tail_position(None, 0))

    def show_output(self) -> None:
        """Write the lines that have ended."""
        self._pass_on(is_over=False)

    def show_rest(self) -> None:
        """Write everything, also unfinished lines. The ranks must have ended."""
        while self._pass_on(is_over=True):
            pass
        for rank, line in self._tracebacks.rest():
            self._write(f"[{rank}] {line}")

    def _pass_on(self, *, is_over: bool) -> bool:
        size = 0
        while size < CHUNK_BYTES and (batch := self._follower.next_batch(lambda _: is_over)):
            for lines in batch:
                size += len(lines.raw) + 1
                shown = []
                for line in decode(lines.raw).split("\n"):
                    shown += self._tracebacks.pass_on(lines.name.rank, line)
                if shown:
                    self._write("\n".join(f"[{lines.name.rank}] {line}" for line in shown))
        return size > 0

    def show_event(self, event: EventView) -> None:
        message = OWN_MESSAGES.get(event.kind, event.message)
        if message and event.kind not in ROUTINE_EVENTS:
            say(self._tracebacks.shorten(message))

    def show_end(self, job: JobView) -> None:
        say(f"logs: {self._files.logs}")
        if job.status not in FINISHED:
            say(f"interrupted; the same command with --job-id {job.job_id} goes on")
