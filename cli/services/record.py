"""Which `muster up` serves a data directory: a lock file, and a record that says where its API is.

The kernel releases the lock however its holder ends. The record may outlive the process, so it
names that by pid, start time and boot id, and counts only while exactly this process runs.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

import msgspec

from muster.contracts.errors import MusterError
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import CA_FILE, LOOPBACK_NAMES, ServiceSettings, api_url
from muster.host.files import replace_private
from muster.host.limits import usable_processors
from muster.host.private import UnusableDirectory, make_private
from muster.host.processes import is_running

HEALTH_SECONDS: Final = 2.0


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A `muster up` and where its API listens; or a `muster node`, and its relay."""

    url: str
    process: ProcessRecord
    log: str | None = None
    """The file that receives the output of `up` and its services. None: a terminal or a pipe."""
    is_ending: bool = False
    ca_file: str | None = None
    """The certificate that clients must trust if the API has a self-signed one."""
    node_port: int | None = None
    """Where a `muster node` listens for others; None for a `muster up`."""


@contextmanager
def service_lock(
    files: DataDir, advice: str = "use that one, or set MUSTER_DATA_DIR for another"
) -> Iterator[None]:
    """Hold the lock of a data directory; raises a `MusterError` if other services have it."""
    with open_for_append(files, files.services_lock) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            record = read_record(files)
            where = f", at {record.url}" if record else ""
            raise MusterError(f"Muster is up already for {files.root}{where}: {advice}") from None
        yield
        files.services_record.unlink(missing_ok=True)


def open_for_append(files: DataDir, path: Path) -> BinaryIO:
    """Open a file of the data directory, create both if needed; raises `UnusableDirectory`."""
    try:
        make_private(files.root)
        path.touch(mode=0o600)
        return path.open("ab")
    except OSError as error:
        raise UnusableDirectory.because_of(files.root, error) from error


def write_record(files: DataDir, record: ServiceRecord) -> None:
    """Write the record of the process that holds the lock; raises `UnusableDirectory`."""
    try:
        replace_private(files.services_record, msgspec.json.encode(record))
    except OSError as error:
        raise UnusableDirectory.because_of(files.root, error) from error


def read_record(files: DataDir) -> ServiceRecord | None:
    """Return the record of the `muster up` that runs for a data directory, if there is one."""
    with suppress(OSError, msgspec.MsgspecError):
        record = msgspec.json.decode(files.services_record.read_bytes(), type=ServiceRecord)
        return record if is_running(record.process) else None
    return None


def service_settings() -> ServiceSettings:
    """Return the settings of this environment's services; raises `InvalidEnvironment`."""
    return ServiceSettings.read(os.environ, cores=usable_processors())


def find_own_services() -> ServiceRecord | None:
    """Return the `muster up` of this environment's data directory, or its `muster node`.

    None if nothing runs there, or if MUSTER_URL or MUSTER_PORT names another API.
    """
    try:
        record = read_record(DataDir(service_settings().data_dir))
        return record if record and _is_meant(record, os.environ) else None
    except (MusterError, OSError):  # unreadable settings, or a working directory that is gone
        return None


def _is_meant(record: ServiceRecord, environ: Mapping[str, str]) -> bool:
    own = urlsplit(record.url)
    if environ.get("MUSTER_URL"):
        asked = urlsplit(api_url(environ))
        is_here = asked.hostname in {own.hostname, *LOOPBACK_NAMES}
        return is_here and (asked.scheme, asked.port) == (own.scheme, own.port)
    return environ.get("MUSTER_PORT", "") in {"", "0", str(own.port)}


def address_of(record: ServiceRecord | None) -> tuple[str | None, str | None]:
    """Return URL and CA file for a client of these services; None leaves it to the environment."""
    if record is None:
        return None, None
    url = None if os.environ.get("MUSTER_URL") else record.url
    is_trusted = record.ca_file and not os.environ.get(CA_FILE) and Path(record.ca_file).is_file()
    return url, record.ca_file if is_trusted else None


def is_serving(url: str) -> bool:
    """True if API, coordinator and database all work.

    A disk that is nearly full does not count: `muster status` reports it.
    """
    import httpx  # noqa: PLC0415  60 ms that most commands need later, or not at all

    try:
        # This asks our own child, at an address that its certificate need not name.
        answer = httpx.get(f"{url}/health", verify=False, trust_env=False, timeout=HEALTH_SECONDS)  # noqa: S501
        checks = answer.json()["checks"]
        return all(checks[name]["status"] == "ok" for name in ("database", "coordinator"))
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return False
