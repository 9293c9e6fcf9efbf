"""What routes depend on: the service's state and coordinator, the caller, the scope they require.

Every route but the probes declares its scope, ``@router.post("/jobs", dependencies=[SUBMIT])``, so
it is in the OpenAPI document as well.
"""

import os
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Final, TypeAlias, TypeVar, cast

from anyio import CapacityLimiter
from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer, SecurityScopes
from prometheus_client import CollectorRegistry

from api.access.auth import CHANGING_METHODS, Caller, logged_refusal, require_scope
from api.errors import ServiceUnavailable
from api.streams import IDLE_SECONDS, Feeds, JobCache
from api.submission import SubmissionQueue, Submitter
from api.watch import Found, WatchFeed
from database.engine import Database
from database.errors import DatabaseError, DatabaseFull
from database.history import History
from database.hosts import Hosts
from database.idempotency import Answers
from database.jobs import Jobs
from database.leases import LEASE_SECONDS
from database.records import Job, Lease
from database.tokens import Tokens
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.status import JobId, JobUid, StopRequest
from muster.contracts.settings.paths import DataDir
from muster.contracts.token import Scope
from muster.host.files import closing
from muster.host.processes import is_provably_gone, is_running, is_stopped
from muster.logs.local import LocalLogs

API_VERSION: Final = "v1"
PREFIX: Final = f"/api/{API_VERSION}"

LEASE_CACHED_SECONDS: Final = 1.0
"""How long the address of the coordinator is kept; a new coordinator reads all rows anyway."""


RESERVE_BYTES: Final = 4 << 20
"""Measured: to stop a job takes 17 KiB of journal, to delete one with 20,000 events 4 MiB."""

Result = TypeVar("Result")


class CoordinatorHandle:
    """Tells whether the holder of the lease is alive, and wakes it. Thread-safe."""

    def __init__(
        self, read_lease: Callable[[], Lease | None], monotonic: Callable[[], float]
    ) -> None:
        self._read_lease = read_lease
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._moved_at = 0.0
        self._cached: tuple[float, Lease | None] | None = None

    def absence(self) -> str | None:
        """Return why there is no working coordinator, or None if there is one."""
        lease = self._read_lease()
        if lease is None:
            return "no coordinator is running: start one with `muster up` (or `make up`)"
        process = lease.process
        if is_running(process):
            if not is_stopped(process.pid):
                return None
            return (
                f"the coordinator (pid {process.pid}) is stopped by a signal: continue it with "
                f"`kill -CONT {process.pid}`, or end it with `kill -9 {process.pid}`"
            )
        if not is_provably_gone(process) and self._age_seconds(lease) < LEASE_SECONDS:
            return None
        return (
            f"the coordinator (pid {process.pid} on {process.node}) does not respond: start one "
            "with `muster up` (or `make up`)"
        )

    def lease_age_seconds(self) -> float | None:
        """Return for how long the lease was not seen to be renewed; None if it has no holder."""
        lease = self._read_lease()
        return None if lease is None else self._age_seconds(lease)

    def wake(self) -> None:
        """Send an empty datagram to the address in the lease, after writing a row.

        If it is lost, the coordinator finds the row at its next poll. Without an address the
        database itself has notified the coordinator of the commit.
        """
        with suppress(OSError, DatabaseError, ValueError):
            lease = self._recent_lease()
            if lease is not None and lease.address:
                host, _, port = lease.address.rpartition(":")
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                    sender.sendto(b"", (host, int(port)))

    def _recent_lease(self) -> Lease | None:
        now, cached = self._monotonic(), self._cached
        if cached is not None and now - cached[0] < LEASE_CACHED_SECONDS:
            return cached[1]
        lease = self._read_lease()
        self._cached = now, lease
        return lease

    def _age_seconds(self, lease: Lease) -> float:
        """Return for how long the heartbeat of the lease has not moved, by our own clock.

        The first one seen counts. The wall clocks of two machines are never compared.
        """
        with self._lock:
            now = self._monotonic()
            beat = (lease.epoch, lease.beat)
            if beat != self._seen:
                self._seen, self._moved_at = beat, now
            return now - self._moved_at


class DiskReserve:
    """A file that is removed to make room for requests that clear a full disk.

    SQLite needs room for a journal of every page that it changes, also to delete rows. Only the API
    removes it: the coordinator, which renews its lease every second, would waste the room.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def allocate(self) -> None:
        """Allocate what is missing of the file, unless the disk is nearly full."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with suppress(OSError), closing(os.open(self._path, flags, 0o600)) as file:
            is_missing = os.fstat(file).st_size < RESERVE_BYTES
            if is_missing and shutil.disk_usage(self._path.parent).free >= 2 * RESERVE_BYTES:
                os.posix_fallocate(file, 0, RESERVE_BYTES)

    def release_if_full(self, request: Callable[[], Result]) -> Result:
        """Run `request`; if the disk is full, remove the file and run it again."""
        try:
            return request()
        except DatabaseFull:
            self._path.unlink(missing_ok=True)
            return request()


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """Everything that the routes of one running service use."""

    database: Database
    jobs: Jobs
    history: History
    hosts: Hosts
    answers: Answers
    tokens: Tokens
    job_cache: JobCache
    feeds: Feeds
    log_readers: CapacityLimiter
    """Threads for the feeds of logs."""
    log_searches: CapacityLimiter
    """Threads for searches in logs, so that these do not hold up other routes."""
    coordinator: CoordinatorHandle
    node: str
    """The id of this host."""
    submitter: Submitter
    submission_queue: SubmissionQueue
    data_dir: DataDir
    disk_reserve: DiskReserve
    is_closing: Callable[[], bool]
    """True when the service stops, so that waiting requests must be answered."""
    requests: Counter[tuple[str, int]]
    """How many were answered, by template of the path and status code."""
    metrics: CollectorRegistry
    clock: Callable[[], datetime]
    uptime_seconds: Callable[[], float]

    def watching(
        self, key: Hashable, read: Callable[[int], Found | None]
    ) -> AbstractAsyncContextManager[WatchFeed]:
        """Return the feed of what `read` returns, for as long as a client reads it."""
        make = partial(
            WatchFeed, read=read, changes=self.database.changes, is_closing=self.is_closing
        )
        return self.feeds.reading(key, make)

    def host_name(self, host: str) -> str:
        """Return what people call a host."""
        own = LOCAL_HOST if host == self.node else host
        return self.submitter.read_members().names.get(host, own)

    def host_named(self, name: str) -> str:
        """Return the host that people call so; the name itself if there is none."""
        names = {shown: host for host, shown in self.submitter.read_members().names.items()}
        return names.get(name, self.node if name == LOCAL_HOST else name)

    def logs_of(self, job_id: JobId) -> LocalLogs:
        return LocalLogs(self.data_dir.job(job_id))

    def request_stop(
        self,
        job_id: JobId,
        request: StopRequest,
        grace_seconds: float | None,
        *,
        actor: str,
        why: str | None = None,
        uid: JobUid | None = None,
    ) -> Job:
        """Do as `Jobs.request_stop` and wake the coordinator."""
        stop = partial(self.jobs.request_stop, job_id, request, grace_seconds, why)
        job = self.disk_reserve.release_if_full(partial(stop, actor=actor, uid=uid))
        self.coordinator.wake()
        return job


# These dependencies are coroutines because FastAPI runs plain functions in a thread.
async def _state(request: Request) -> AppState:
    return cast(AppState, request.app.state.app_state)


State = Annotated[AppState, Depends(_state)]


async def _caller(request: Request) -> Caller:
    return cast(Caller, request.scope["state"]["caller"])


CurrentCaller = Annotated[Caller, Depends(_caller)]


Reauthenticate: TypeAlias = Callable[[], Awaitable[None]]
"""Authenticates the caller again; raises `Problem` if the token was revoked or has expired."""


async def _reauthentication(request: Request) -> Reauthenticate:
    async def reauthenticate() -> None:
        with logged_refusal(request.scope):
            await request.scope["state"]["authenticate"]()

    return reauthenticate


Reauthentication = Annotated[Reauthenticate, Depends(_reauthentication)]
"""For a route that waits before it changes something, or that streams for a long time."""


def now_and_then(reauthenticate: Reauthenticate) -> Reauthenticate:
    """Return the same for a loop: it asks once in `IDLE_SECONDS`, and goes on without an answer."""
    asked_at = monotonic()

    async def check() -> None:
        nonlocal asked_at
        if monotonic() - asked_at >= IDLE_SECONDS:
            asked_at = monotonic()
            with suppress(ServiceUnavailable):  # tokens cannot be read now
                await reauthenticate()

    return check


_BEARER: Final = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="Created with `muster token create`; the service's own user on its machine needs "
    "none.",
)


async def _check_scope(
    request: Request, needed: SecurityScopes, _shown: Annotated[object, Depends(_BEARER)]
) -> None:
    with logged_refusal(request.scope):
        if request.method in CHANGING_METHODS:
            # The body may have taken seconds to arrive since the middleware knew the caller.
            await request.scope["state"]["authenticate"]()
        require_scope(request.scope["state"]["caller"], Scope(needed.scopes[-1]))


READ: Final = Security(_check_scope, scopes=[Scope.READ])
SUBMIT: Final = Security(_check_scope, scopes=[Scope.SUBMIT])
ADMIN: Final = Security(_check_scope, scopes=[Scope.ADMIN])
