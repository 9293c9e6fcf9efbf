"""Starts the front desk: settings → database → application → server. Wiring only."""

import gc
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Final

import structlog
import uvicorn
from anyio import CapacityLimiter
from starlette.types import ASGIApp, Scope

from api.app import build
from api.desk import FrontDesk
from api.door import Door
from api.exposure import refuse_exposure, refuse_lockout
from api.feeds import Feeds
from api.glances import Glance, Glances
from api.identity import Identities
from api.intake import Intake
from api.limits import Limits
from api.liveness import CoordinatorWatch
from api.nudge import Nudge
from api.protocol import DeadlineProtocol
from api.remembered import RememberedTokens
from api.searches import Searches
from api.submission import Submitter
from api.tls_files import check_certificate
from muster import journal, lifeline
from muster.contracts.environ import TOKEN, DoorSettings, ServiceSettings, is_clients_token
from muster.contracts.errors import MusterError
from muster.contracts.job import JobId
from muster.contracts.layout import DataDirectory
from muster.remarks import remark
from store.clock import utc_now
from store.commits import Commits
from store.database import Database
from store.events import Events
from store.idempotency import Answers
from store.incarnations import Incarnations
from store.jobs import Jobs
from store.leases import COORDINATOR_LEASE, Leases
from store.members import Members
from store.records import Lease
from store.tokens import Tokens
from store.workers import Workers

_LOG: Final = structlog.get_logger("api")

TURNED_AWAY: Final = frozenset(
    {"request_refused", "connection_refused", "not_ready", "token_not_looked_up"}
)
"""The actions of lines that anybody can make us write: of the door, the protocol and /readyz."""

LOG_READERS = 8
"""Threads that read logs for streams: of their own, so that they hold up nobody else."""

GRACEFUL_SHUTDOWN_SECONDS = 4
"""After SIGTERM; streams end at once by themselves, this is for answers on their way."""


FOREIGN_TOKEN = (
    f"api: {TOKEN} is a token that some service made, so it opens nothing here: unset it where "
    "you speak to this one; or make one up for it (try: openssl rand -hex 32)"
)


class PortTaken(MusterError):
    """Somebody listens there already."""

    def __init__(self, host: str, port: int, error: OSError) -> None:
        super().__init__(
            f"cannot listen on {host} port {port} ({error.strerror}): stop what listens there, "
            "or choose another port with MUSTER_PORT"
        )


def main() -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit code."""
    lifeline.follow(os.environ)
    journal.configure("api", summed_up=TURNED_AWAY)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    lifeline.release_interrupt()
    try:
        settings = ServiceSettings.read(os.environ, cores=os.cpu_count() or 1)
        door = DoorSettings.read(os.environ)
        if is_clients_token(os.environ):
            remark(FOREIGN_TOKEN)
        if door.tls_certfile is not None:
            check_certificate(door.tls_certfile, door.tls_keyfile)
        database = Database.open(settings.database_url)
    except MusterError as error:
        remark(f"api: {error}")
        return 1
    try:
        listener = _listen(settings, door, Tokens(database))
        _serve(settings, door, listener, database)
    except MusterError as error:
        remark(f"api: {error}")
        return 1
    finally:
        database.close()
    return 0


def _serve(
    settings: ServiceSettings, door: DoorSettings, listener: socket.socket, database: Database
) -> None:
    host, port = listener.getsockname()[:2]
    tokens = RememberedTokens(database, time.monotonic)
    desk = _desk(settings, database, tokens, is_closing=lambda: server.should_exit)
    config = uvicorn.Config(
        _guarded(build(desk), settings.host, door, tokens),
        http=_protocol(door),
        ws="none",
        # The client's address decides who it is: no header may speak for it.
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        # What is refused the protocol tells by itself, with who it was.
        log_level=logging.ERROR,
        ssl_certfile=door.tls_certfile,
        ssl_keyfile=door.tls_keyfile,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_SECONDS,
    )
    url = f"{'https' if door.tls_certfile else 'http'}://{_bracketed(host)}:{port}"
    _LOG.info(f"listens on {url}", action="listening", url=url)
    server = uvicorn.Server(config)
    # What was loaded stays for good: a collector that walks through all of it, now and then, holds
    # up everybody for a tenth of a second.
    gc.freeze()
    server.run(sockets=[listener])


def _protocol(door: DoorSettings) -> type[DeadlineProtocol]:
    class Protocol(DeadlineProtocol):
        own_uid = None if door.require_token else os.geteuid()
        connections_at_once = door.connections_at_once

    return Protocol


def _guarded(app: ASGIApp, host: str, door: DoorSettings, tokens: RememberedTokens) -> ASGIApp:
    return Door(
        app,
        identities=Identities(
            tokens,
            utc_now,
            own_uid=os.geteuid(),
            require_token=door.require_token,
            token_sha256=door.token_sha256,
        ),
        limits=Limits(
            per_second=door.requests_per_second,
            at_once=door.requests_at_once,
            monotonic=time.monotonic,
        ),
        caller_uid=_caller_uid,
        hosts={host, *door.allowed_hosts},
    )


def _desk(
    settings: ServiceSettings,
    database: Database,
    tokens: Tokens,
    is_closing: Callable[[], bool],
) -> FrontDesk:
    started = time.monotonic()
    jobs, workers, leases = Jobs(database), Workers(database), Leases(database)

    files = DataDirectory(settings.data_dir)
    glances = Glances(_glance(jobs, workers), time.monotonic)

    def lease() -> Lease | None:
        return leases.current(COORDINATOR_LEASE)

    nudge = Nudge(lease, monotonic=time.monotonic)
    return FrontDesk(
        database=database,
        jobs=jobs,
        workers=workers,
        members=Members(database),
        incarnations=Incarnations(database),
        commits=Commits(database),
        events=Events(database),
        answers=Answers(database),
        tokens=tokens,
        glances=glances,
        coordinator=CoordinatorWatch(lease, monotonic=time.monotonic),
        nudge=nudge,
        intake=Intake(jobs.create_all, nudge),
        submitter=Submitter(
            settings=settings,
            working_dir=Path.cwd(),
            clock=utc_now,
            random_hex=lambda: uuid.uuid4().hex,
            checkpoint_dir_of=_checkpoint_dir_of(jobs),
            search_path=os.environ.get("PATH"),
        ),
        files=files,
        feeds=Feeds(files, glances, is_closing=is_closing, readers=CapacityLimiter(LOG_READERS)),
        is_closing=is_closing,
        searches=Searches(),
        clock=utc_now,
        uptime_seconds=lambda: time.monotonic() - started,
        version=version("muster-train"),
    )


def _checkpoint_dir_of(jobs: Jobs) -> Callable[[JobId], str | None]:
    def find(job_id: JobId) -> str | None:
        job = jobs.find(job_id)
        return job.spec.checkpoint_dir if job else None

    return find


def _glance(jobs: Jobs, workers: Workers) -> Callable[[JobId], Glance | None]:
    def read(job_id: JobId) -> Glance | None:
        job = jobs.find(job_id)
        return Glance(job, workers.of_job(job_id)) if job else None

    return read


def _listen(settings: ServiceSettings, door: DoorSettings, tokens: Tokens) -> socket.socket:
    host, port = settings.host, settings.port
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        refuse_lockout(door, tokens.is_any_valid)
        refuse_exposure(host, str(address[0]), door, tokens.is_any_valid)
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise PortTaken(host, port, error) from error


def _caller_uid(scope: Scope) -> int | None:
    uid: int | None = scope["state"].get("caller_uid")
    return uid


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
