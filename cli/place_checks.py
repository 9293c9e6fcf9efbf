"""Are the places that the settings name ones where Muster can work?"""

import ipaddress
import os
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from api.preflight import inspect_database, refuse_door
from api.tls_files import InvalidCertificate
from cli.findings import Check, Finding, mending, problem, warning, well
from cli.office import holder_of
from cli.probe import write_probe
from cli.required_token import NO_ADMIN, is_without_admin
from cli.tls_key import key_open_to_all, only_for_oneself
from muster.contracts.environ import DoorSettings, ServiceSettings
from muster.contracts.errors import MusterError
from muster.contracts.layout import DataDirectory
from muster.contracts.room import has_few_files_left, is_nearly_full
from muster.contracts.token import WAY_TO_ADMIN
from muster.ports import NotHere, NotToBeHad, is_free
from muster.safe import Safe

SLOW_SECONDS: Final = 0.05
"""A disk that takes longer to make a small write durable slows every submission and checkpoint."""

WRITES: Final = 5
SKEW_SECONDS: Final = 2.0

FAR_KINDS: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "afs", "lustre"})
"""File systems of other machines, whose locks SQLite had better not trust."""


def place_checks(settings: ServiceSettings, environ: Mapping[str, str]) -> Iterator[Check]:
    """Yield what is to be looked at."""
    yield "data", lambda: _writable("data", settings.data_dir, "MUSTER_DATA_DIR")
    yield "disk", lambda: _durable(settings.data_dir)
    yield "room", lambda: _room(settings.data_dir)
    yield "clock", lambda: _clock(settings.data_dir)
    yield "checkpoints", lambda: _writable("checkpoints", settings.checkpoint_dir, "CHECKPOINT_DIR")
    yield "database", lambda: _database(settings)
    yield "port", lambda: _port(settings, environ)
    yield "door", lambda: _door(settings, DoorSettings.read(environ))
    yield "secrets", lambda: _secrets(DataDirectory(settings.data_dir).secrets)


def _writable(about: str, directory: Path, variable: str) -> Finding:
    present = _nearest(directory)
    seen = f"{directory}" if present == directory else f"{directory}, to be made"
    try:
        write_probe(present)
        return well(about, seen)
    except OSError as error:
        fix = f"{mending(error, 'make it writable for this user')}, or set {variable}"
        return problem(about, f"{directory}: {error.strerror}", fix)


def _durable(directory: Path) -> Finding:
    present = _nearest(directory)
    kind = _kind_of_file_system(present)
    seconds = statistics.median(_write_seconds(present) for _ in range(WRITES))
    seen = f"{kind}, a durable write takes {seconds * 1000:.1f} ms"
    if kind in FAR_KINDS:
        fix = "a database of SQLite wants a disk of this machine: set MUSTER_DATA_DIR"
        return warning("disk", seen, fix)
    if seconds > SLOW_SECONDS:
        return warning("disk", seen, "put MUSTER_DATA_DIR on a faster disk")
    return well("disk", seen)


def _write_seconds(directory: Path) -> float:
    with tempfile.TemporaryFile(dir=directory) as file:
        began = time.monotonic()
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
        return time.monotonic() - began


def _room(directory: Path) -> Finding:
    present = _nearest(directory)
    usage, files = shutil.disk_usage(present), os.statvfs(present)
    seen = f"{usage.free >> 20} MiB of {usage.total >> 20} are free"
    few_files = has_few_files_left(files.f_favail, files.f_files)
    if few_files:
        seen += f", but there can be only {files.f_favail} more files (inodes)"
    if few_files or is_nearly_full(usage.free, usage.total):
        return warning("room", seen, "make room, or delete old jobs: muster purge --help")
    return well("room", seen)


def _clock(directory: Path) -> Finding:
    with tempfile.NamedTemporaryFile(dir=_nearest(directory)) as file:
        skew = abs(Path(file.name).stat().st_mtime - time.time())
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if skew > SKEW_SECONDS:
        fix = "let both machines keep time by NTP"
        return warning("clock", f"{now}, {skew:.0f} s from that of the disk", fix)
    return well("clock", now)


def _database(settings: ServiceSettings) -> Finding:
    try:
        found = inspect_database(settings.database_url)
    except MusterError as error:
        fix = "MUSTER_DATABASE_URL names it; unset, it is a file in the data directory"
        return problem("database", str(error), fix)
    kind = settings.database_url.partition(":")[0].partition("+")[0]
    named = f"SQLite {sqlite3.sqlite_version}" if kind == "sqlite" else "PostgreSQL"
    if found.revision is None:
        return well("database", f"{named}, its tables to be made")
    if found.revision == found.wanted:
        return well("database", f"{named}, schema {found.revision}")
    if found.revision < found.wanted:
        return well("database", f"{named}, schema {found.revision}: the next start migrates it")
    return problem(
        "database", f"{named}, schema {found.revision}: of a later Muster", "upgrade Muster"
    )


def _port(settings: ServiceSettings, environ: Mapping[str, str]) -> Finding:
    where = f"{settings.host} port {settings.port}"
    holder = holder_of(DataDirectory(settings.data_dir))
    if holder is not None:
        return well("port", f"Muster is up, at {holder.url}")
    try:
        if settings.port == 0 or is_free(settings.host, settings.port):
            return well("port", f"{where} is free")
    except NotHere as error:
        return problem("port", str(error), "`ip address` shows those of this machine")
    except NotToBeHad as error:
        return problem("port", str(error), "choose another with MUSTER_PORT")
    if environ.get("MUSTER_PORT"):
        fix = "stop what listens there, or choose another with MUSTER_PORT"
        return problem("port", f"{where} is taken", fix)
    return warning("port", f"{where} is taken", "muster up takes another, and says which")


def _door(settings: ServiceSettings, door: DoorSettings) -> Finding:
    try:
        address = refuse_door(settings, door)
    except InvalidCertificate as error:
        return problem("door", error.seen, error.fix)
    except MusterError as error:
        return problem("door", str(error), "SECURITY.md has the ways to let others in")
    key = key_open_to_all(door)
    if key:
        return warning(
            "door", f"{key} is the key of TLS, and others may read it", only_for_oneself(key)
        )
    if is_without_admin(settings, door):
        return warning("door", NO_ADMIN, WAY_TO_ADMIN)
    if ipaddress.ip_address(address).is_loopback:
        whom = "whoever has a token," if door.require_token else "this user"
        return well("door", f"open to {whom} on this machine")
    return well("door", f"open to other machines, {'with' if door.tls_certfile else 'without'} TLS")


def _secrets(directory: Path) -> Finding:
    safe = Safe(directory)
    faults = list(safe.faults())
    if faults:
        return problem("secrets", "; ".join(faults), "keep it anew: muster secret set NAME")
    return well("secrets", f"{len(safe.names())} in {directory}")


def _nearest(directory: Path) -> Path:
    """Return the directory, or the nearest above it that is there."""
    return next(place for place in (directory, *directory.parents) if place.exists())


def _kind_of_file_system(directory: Path) -> str:
    """Return the kind of the file system that a directory is on."""
    best, kind = Path("/"), "a disk"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        place, found = Path(line.split()[1]), line.split()[2]
        if directory.resolve().is_relative_to(place) and place.is_relative_to(best):
            best, kind = place, found
    return kind
