"""Which `muster up` serves a data directory: a lock file, and a record that says where its API is.

The kernel releases the lock however its holder ends. The record may outlive the process, so it
names that by pid, start time and boot id, and counts only while exactly this process runs.
"""

import fcntl
import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

import msgspec

from cli.config import service_settings
from cli.errors import Misuse
from cli.output import notice_if_slow
from muster.contracts.errors import MusterError
from muster.contracts.paths import DataDir
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings import CA_FILE, api_url
from muster.host.processes import is_running, this_process

LOCK_SECONDS: Final = 1.0
"""`is_locked` holds the lock for a moment, so one refusal does not prove that another `up` runs."""

HEALTH_SECONDS: Final = 2.0
CONNECT_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.1

RESTART_SECONDS: Final = 20.0
"""How long a command waits for an API that `muster up` is starting again."""


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A `muster up` and where its API listens."""

    url: str
    process: ProcessRecord
    log: str | None
    """The file that receives the output of `up` and its services. None: a terminal or a pipe."""
    is_ending: bool
    ca_file: str | None = None
    """The certificate that clients must trust if the API has a self-signed one."""
    names: tuple[str, ...] = ()
    """Other host names by which clients may call the API."""

    def serves(self, url: str) -> bool:
        """True if `url` leads to this API."""
        own, asked = urlsplit(self.url), urlsplit(url)
        is_same_port = (asked.scheme, asked.port) == (own.scheme, own.port)
        return is_same_port and asked.hostname in {own.hostname, *self.names}


class AlreadyUp(MusterError):
    """Another `muster up` holds the data directory."""


class NoDataDirectory(Misuse):
    """The data directory cannot be created or written."""

    def __init__(self, files: DataDir, error: OSError) -> None:
        super().__init__(
            f"{files.root} cannot hold the data ({error.strerror}): make it a directory that this "
            "user may write to, or set MUSTER_DATA_DIR"
        )


class ServiceLock:
    """The right to serve a data directory. Created by `service_lock` only."""

    def __init__(self, files: DataDir) -> None:
        self._files = files
        self._published: ServiceRecord | None = None

    def publish(self, url: str, names: Iterable[str], ca_file: Path | None) -> None:
        """Write the record of this process; raises OSError."""
        self._write(
            ServiceRecord(
                url=url,
                process=this_process(),
                log=_log_of_stderr(self._files.keeper_log),
                is_ending=False,
                ca_file=str(ca_file) if ca_file else None,
                names=tuple(names),
            )
        )

    def publish_end(self) -> None:
        """Record that this process is about to end; raises OSError."""
        if self._published is not None:
            self._write(msgspec.structs.replace(self._published, is_ending=True))

    def _write(self, record: ServiceRecord) -> None:
        temporary = self._files.keeper.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(record))
        temporary.replace(self._files.keeper)
        self._published = record


@contextmanager
def service_lock(files: DataDir) -> Iterator[ServiceLock]:
    """Hold the lock of a data directory; raises `AlreadyUp`, `NoDataDirectory`."""
    with open_for_append(files, files.keeper_lock) as lock:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(lock, fcntl.LOCK_EX):
            record = read_record(files)
            if record or time.monotonic() > deadline:
                where = f", at {record.url}" if record else ""
                raise AlreadyUp(
                    f"Muster is up already for {files.root}{where}: use that one, or set "
                    "MUSTER_DATA_DIR for another"
                )
            time.sleep(POLL_SECONDS)
        yield ServiceLock(files)
        files.keeper.unlink(missing_ok=True)


def open_for_append(files: DataDir, path: Path) -> BinaryIO:
    """Open a file of the data directory, create both if needed; raises `NoDataDirectory`."""
    try:
        files.root.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        return path.open("ab")
    except OSError as error:
        raise NoDataDirectory(files, error) from error


def read_record(files: DataDir) -> ServiceRecord | None:
    """Return the record of the `muster up` that runs for a data directory, if there is one."""
    with suppress(OSError, msgspec.MsgspecError):
        record = msgspec.json.decode(files.keeper.read_bytes(), type=ServiceRecord)
        return record if is_running(record.process) else None
    return None


def is_locked(files: DataDir) -> bool:
    """True if a `muster up` holds the data directory, also before it has written its record."""
    try:
        with files.keeper_lock.open("rb") as lock:
            # Shared, so that two processes that look do not see each other.
            return not _try_lock(lock, fcntl.LOCK_SH)
    except OSError:
        return False


def find_own_services() -> ServiceRecord | None:
    """Return the `muster up` of this environment's data directory.

    None if nothing runs there, or if MUSTER_URL or MUSTER_PORT names another API.
    """
    try:
        record = read_record(DataDir(service_settings().data_dir))
        return record if record and _is_meant(record, os.environ) else None
    except (MusterError, OSError):  # unreadable settings, or a working directory that is gone
        return None


def address_of(record: ServiceRecord | None) -> tuple[str | None, str | None]:
    """Return URL and CA file for a client of these services; None leaves it to the environment."""
    if record is None:
        return None, None
    url = None if os.environ.get("MUSTER_URL") else record.url
    is_trusted = record.ca_file and not os.environ.get(CA_FILE) and Path(record.ca_file).is_file()
    return url, record.ca_file if is_trusted else None


def await_restart(record: ServiceRecord) -> None:
    """Wait up to `RESTART_SECONDS` while `muster up` starts its API again."""
    if _is_listening(record.url):
        return
    deadline = time.monotonic() + RESTART_SECONDS
    with notice_if_slow(
        f"waiting until `muster up` (process {record.process.pid}) has restarted the API "
        f"at {record.url} …"
    ):
        while not _is_listening(record.url) and time.monotonic() < deadline:
            found = find_own_services()
            if found is None or found.is_ending:
                return
            time.sleep(POLL_SECONDS)


def is_serving(url: str) -> bool:
    """True if API, coordinator and database all work.

    Uses no HTTP library, because `muster up` keeps running and should stay small. A disk that is
    nearly full does not count: `muster status` reports it.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection = http.client.HTTPConnection(host, parts.port, timeout=HEALTH_SECONDS)
    if parts.scheme == "https":
        # This asks our own child, at an address that its certificate need not name.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(
            host, parts.port, timeout=HEALTH_SECONDS, context=context
        )
    try:
        connection.request("GET", "/health")
        checks = json.load(connection.getresponse())["checks"]
        return all(checks[name]["status"] == "ok" for name in ("database", "coordinator"))
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return False
    finally:
        connection.close()


def _try_lock(lock: BinaryIO, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _log_of_stderr(log: Path) -> str | None:
    with suppress(OSError):
        return str(log) if os.path.samestat(os.fstat(2), log.stat()) else None
    return None


def _is_meant(record: ServiceRecord, environ: Mapping[str, str]) -> bool:
    if environ.get("MUSTER_URL"):
        return record.serves(api_url(environ))
    return environ.get("MUSTER_PORT", "") in {"", "0", str(urlsplit(record.url).port)}


def _is_listening(url: str) -> bool:
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError:  # another fault than a missing listener: the command will report it
        return True
    return True
