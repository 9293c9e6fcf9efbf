"""One job with services of its own, from its start to its end.

They are those of `muster up`, in a data directory of the job, and end with this process however
that ends. The job is submitted and followed over HTTP. Ranks print on standard output; what happens
to them is printed on standard error.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import urlsplit

from cli.connection import ATTACHED_SECONDS
from cli.services.following import Follower
from cli.services.processes import ServicePair, failed_start
from cli.services.record import (
    ServiceRecord,
    open_for_append,
    service_lock,
    service_settings,
    write_record,
)
from cli.services.signals import ONE_REQUEST_SECONDS, call_at_signals, ignore_signals
from cli.services.terminal import FINISHED
from muster.contracts.job.retry import INTERRUPTED_CODE
from muster.contracts.job.secrets import SHARED_VARIABLES
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import EXIT_CODES, JobId, JobStatus
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import (
    CLUSTER,
    DEFAULT_HOST,
    TOKEN,
    AccessSettings,
    ServiceSettings,
    local_url,
)
from muster.contracts.settings.variables import read_fields, variables_of
from muster.contracts.views.job import JobView
from muster.host.files import rotate
from muster.host.limits import ShellLimits
from muster.host.ports import free_port
from muster.host.private import make_private
from muster.host.processes import this_process

if TYPE_CHECKING:
    from muster.client import Client

CONNECT_PAUSE_SECONDS: Final = 0.01

LAST_OUTPUT_SECONDS: Final = 2.0
"""How long a terminal that does not read is waited for once the user wants an end."""


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
        record = ServiceRecord(url=url, process=this_process(), log=str(files.services_log))
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
    following = in_thread(partial(follower.run, connect, start, services.mark_served))
    signals: asyncio.Queue[float] = asyncio.Queue()
    call_at_signals(lambda: signals.put_nowait(time.monotonic()))
    pair = (services.api, services.coordinator)
    first_signal = asyncio.ensure_future(signals.get())
    any_of: list[asyncio.Future[Any]] = [*pair, following, first_signal]
    await asyncio.wait(any_of, return_when=asyncio.FIRST_COMPLETED)
    have_failed = any(task.done() for task in pair)
    if not (following.done() or have_failed):
        await _interrupt(services, follower, following, signals, await first_signal)
    # Nothing is left to be saved.
    await asyncio.gather(services.end_coordinator(), services.end_api())
    # The exit code is known now: Python would be killed if Ctrl-C came while it shuts down.
    ignore_signals(asyncio.get_running_loop())
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
        await asyncio.wait([in_thread(follower.show_end)], timeout=LAST_OUTPUT_SECONDS)


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


def in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
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
