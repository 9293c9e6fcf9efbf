"""Who keeps the services of a data directory: one `muster up` at most, and anybody may look who.

The lock says that there is one, and the kernel gives it back however that one ends. The record
beside it says who and where. It may outlive its holder, but never mean somebody else: a process is
named by its pid, its start and the boot (docs/notes/command-line.md).
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

import msgspec

from cli.misuse import Misuse
from muster.contracts.errors import MusterError
from muster.contracts.layout import DataDirectory
from muster.contracts.process import ProcessRecord
from muster.lost_files import loss_of
from muster.patience import Patience
from muster.processes import is_running, myself

LOOKERS: Final = Patience(seconds=1.0, pause_seconds=0.02)
"""Whoever looks whether there is a holder has the lock for a moment, too."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A `muster up` that runs, or did."""

    url: str
    """Where its API is."""
    process: ProcessRecord
    log: str | None
    """The file that it and its services speak to; None: a terminal, or a file of its caller's."""
    is_ending: bool
    ca_file: str | None = None
    """What a client is to trust, where the API has a certificate that nobody else has signed."""
    names: tuple[str, ...] = ()
    """By which clients may call the API, beside that of `url`."""

    def is_at(self, url: str) -> bool:
        """Whether a client that is told `url` asks this one's API."""
        ours, asked = urlsplit(self.url), urlsplit(url)
        is_same = (asked.scheme, asked.port) == (ours.scheme, ours.port)
        return is_same and asked.hostname in {ours.hostname, *self.names}


class AlreadyUp(MusterError):
    """Somebody keeps these services already."""

    def __init__(self, where: str, data_dir: Path) -> None:
        super().__init__(
            f"Muster is up already for {data_dir}, at {where}: use that one, or set "
            "MUSTER_DATA_DIR for another"
        )


class NoDataDirectory(Misuse):
    """The data directory cannot be made or written."""

    def __init__(self, data_dir: Path, error: OSError) -> None:
        super().__init__(
            f"{data_dir} cannot hold the data ({error.strerror}): make it a directory that this "
            "user may write to, or set MUSTER_DATA_DIR"
        )


class Office:
    """Held by whoever keeps the services; made by `sole_office` alone."""

    def __init__(self, files: DataDirectory, lock: BinaryIO) -> None:
        self._files = files
        # Of the opening: a file that is gone for good (NFS) cannot be looked at by its descriptor.
        self._opened = os.fstat(lock.fileno())
        self._published: Holder | None = None

    def publish(self, url: str, names: Iterable[str], ca_file: Path | None) -> None:
        """Write down who we are and where."""
        self._write(
            Holder(
                url=url,
                process=myself(),
                log=_own_log(self._files.keeper_log),
                is_ending=False,
                ca_file=str(ca_file) if ca_file else None,
                names=tuple(names),
            )
        )

    def publish_end(self) -> None:
        """Write down that we are about to leave, where we were; what is lost is not ours to."""
        if self._published is not None and not self.is_lost():
            self._write(msgspec.structs.replace(self._published, is_ending=True))

    def is_lost(self) -> bool:
        """Whether the data directory was removed, moved or replaced.

        The lock that we hold went with it: in its place anybody may take another one.
        """
        return loss_of(self._files.keeper_lock, self._opened) is not None

    def _write(self, holder: Holder) -> None:
        """Keep the record; a reader sees the old one or the new one, whole."""
        temporary = self._files.keeper.with_suffix(".tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(holder))
            temporary.replace(self._files.keeper)
        except OSError:  # there is no room: what is written of it would stay for good
            temporary.unlink(missing_ok=True)
            raise
        self._published = holder


@contextmanager
def sole_office(files: DataDirectory) -> Iterator[Office]:
    """Hold the data directory's lock for a while.

    Raises `AlreadyUp` if somebody else does, `NoDataDirectory` if there can be none.
    """
    with open_in(files, files.keeper_lock) as lock:
        if LOOKERS.outlast(lambda: not _take(lock) and holder_of(files) is None) or not _take(lock):
            holder = holder_of(files)
            where = holder.url if holder else "a place it has yet to find"
            raise AlreadyUp(where, files.root)
        office = Office(files, lock)
        yield office
        if not office.is_lost():
            files.keeper.unlink(missing_ok=True)


def _take(lock: BinaryIO) -> bool:
    """Take the lock, or have it already; False if somebody else has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_in(files: DataDirectory, path: Path) -> BinaryIO:
    """Open a file of the data directory to write at its end, and make both if need be.

    Raises `NoDataDirectory`.
    """
    try:
        files.root.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        return path.open("ab")
    except OSError as error:
        raise NoDataDirectory(files.root, error) from error


def holder_of(files: DataDirectory) -> Holder | None:
    """Return the `muster up` that runs for this data directory, once it knows where it is."""
    with suppress(OSError, msgspec.MsgspecError):
        holder = msgspec.json.decode(files.keeper.read_bytes(), type=Holder)
        return holder if is_running(holder.process) else None
    return None


def is_held(files: DataDirectory) -> bool:
    """Whether somebody holds the data directory's lock now, known or not yet."""
    try:
        with files.keeper_lock.open("rb") as lock:
            # Shared, so that two who look do not see each other; given back at once.
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _own_log(log: Path) -> str | None:
    """Return `log` if what we say on standard error goes there."""
    with suppress(OSError):
        return str(log) if os.path.samestat(os.fstat(2), log.stat()) else None
    return None
