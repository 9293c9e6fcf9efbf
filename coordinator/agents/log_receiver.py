"""Writes the logs that other hosts send into the job's directory, where local ranks write theirs.

Nothing of what a host says becomes a path: it names rank, attempt and kind of file. An attempt
belongs to the host that was the first to send it. One thread does all writing, so a slow disk
delays no job; one that is full holds up the senders.
"""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, Protocol, TypeVar

import structlog

from muster.contracts.job.status import JobUid
from muster.contracts.messages.agent import AgentClaim, LogHello
from muster.contracts.messages.logs import (
    BatchKept,
    BatchSent,
    DrainLogs,
    Kind,
    LogPart,
    LogsAtCoordinator,
    LogsDrained,
    ReceiverMessage,
)
from muster.contracts.messages.wire import decode_sender_message
from muster.contracts.settings.paths import JobFiles, LogName
from muster.host.files import (
    KEEP_SIZE,
    PUNCH_HOLE,
    closing,
    fallocate,
    file_identity,
    open_directory,
    open_named_directory,
)

SIZES_LIMIT: Final = 4096  # files in one message, which then is well below the limit of a frame
FULL_PAUSE_SECONDS: Final = 1.0
BLOCK_BYTES: Final = 1 << 16  # no file system has larger ones

_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_APPEND: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_LOG: Final = structlog.get_logger("coordinator")

Result = TypeVar("Result")


class LogListener(Protocol):
    """Knows the jobs whose logs come."""

    def coordinator_files(self, claim: AgentClaim) -> JobFiles | None:
        """Return the files of the job; None if the sender is not one that was started for it."""

    def may_send(self, claim: AgentClaim, name: LogName) -> bool:
        """Return False for an attempt that the host cannot have run."""

    def is_draining(self, uid: JobUid, host: str) -> bool:
        """Return True if the host was asked to tell when all logs are sent."""

    def on_drained(self, claim: AgentClaim, message: LogsDrained) -> None:
        """Note that all of them are sent."""


class Disk:
    """The thread that writes logs. It is started by the first one."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "logs")
        self._is_full = False

    async def do(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns, which is repeated while the disk is full. Raises OSError."""
        while True:
            try:
                result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not self._is_full:
                    words = "the logs of other hosts wait there until this disk has room again"
                    _LOG.warning(words, action="logs_wait", error=str(error))
                self._is_full = True
                await asyncio.sleep(FULL_PAUSE_SECONDS)
            else:
                self._is_full = False
                return result

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


async def receive_logs(
    hello: LogHello,
    claim: AgentClaim,
    listener: LogListener,
    disk: Disk,
    receive: Callable[[], Awaitable[bytes]],
    send: Callable[[ReceiverMessage], None],
) -> None:
    """Converse with one sender. Raises `WireError`, `AuthenticationFailed`, `EOFError`, OSError."""
    files = listener.coordinator_files(claim)
    if files is None:
        return
    received = CoordinatorLogs(files, claim.host)
    sizes = await disk.do(partial(received.sizes, claim.job_uid, hello.directory))
    for start in range(0, max(1, len(sizes)), SIZES_LIMIT):
        batch = tuple(sizes[start : start + SIZES_LIMIT])
        send(LogsAtCoordinator(sizes=batch, is_last=start + SIZES_LIMIT >= len(sizes)))
    if listener.is_draining(JobUid(claim.job_uid), claim.host):
        send(DrainLogs())
    while True:
        match message := decode_sender_message(await receive()):
            case LogPart():
                if listener.may_send(claim, LogName(message.rank, message.attempt)):
                    await disk.do(partial(received.keep, message))
            case BatchSent():
                send(BatchKept())
            case LogsDrained():
                listener.on_drained(claim, message)


class CoordinatorLogs:
    """A job's files here, as far as another host has sent them. Its methods raise OSError."""

    def __init__(self, files: JobFiles, host: str) -> None:
        self._files = files
        self._host = host

    def sizes(
        self, job_uid: str, theirs: tuple[int, int] | None
    ) -> list[tuple[int, int, Kind, int]]:
        """Return the size of each file that the host has sent.

        `theirs` is the identity of `uid` in the host's own directory of the job, if it is known.
        """
        if self._files.owner.read_text() != job_uid:
            raise FileNotFoundError("the directory of the job belongs to another one")
        if file_identity(self._files.owner) == theirs:
            raise OSError(f"{self._host} has the same data directory: each host needs its own")
        found: list[tuple[int, int, Kind, int]] = []
        with closing(self._open("logs")) as logs, closing(self._open("run", "exits")) as exits:
            places: dict[Kind, int] = {"log": logs, "times": logs, "exit": exits}
            for entry in os.listdir(logs):  # noqa: PTH208  a descriptor
                stem, _, suffix = entry.rpartition(".")
                name = LogName.parse(f"{stem}.log")
                if name is None or suffix != "host":
                    continue
                if os.readlink(entry, dir_fd=logs) != self._host:
                    continue
                for kind, where in places.items():
                    with suppress(FileNotFoundError):
                        size = os.stat(f"{stem}.{kind}", dir_fd=where).st_size
                        found.append((*name.key, kind, size))
        return found

    def keep(self, part: LogPart) -> None:
        """Write a part; may be repeated."""
        stem = LogName(part.rank, part.attempt).stem
        with closing(self._open("logs")) as logs:
            if not self._is_of_host(stem, logs):
                return
            if part.kind != "exit":
                with closing(os.open(f"{stem}.{part.kind}", _APPEND, 0o600, dir_fd=logs)) as file:
                    _write(file, part)
                return
        with closing(self._open("run", "exits")) as exits:
            temporary = f"{stem}.exit.sent.tmp"
            with closing(os.open(temporary, _APPEND, 0o600, dir_fd=exits)) as file:
                _write(file, part)
            os.replace(temporary, f"{stem}.exit", src_dir_fd=exits, dst_dir_fd=exits)

    def _open(self, *below: str) -> int:
        """Return a descriptor of a directory of the job; no link is followed to it."""
        directory = open_named_directory(self._files.root.parent)
        for number, part in enumerate((self._files.root.name, *below)):
            with closing(directory):
                if number:  # a job that was deleted meanwhile has no directory any more
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=directory)
                directory = open_directory(part, directory)
        return directory

    def _is_of_host(self, stem: str, logs: int) -> bool:
        """Return whether an attempt belongs to the sending host; a new one does from now on."""
        with suppress(FileNotFoundError):
            return os.readlink(f"{stem}.host", dir_fd=logs) == self._host
        with suppress(FileNotFoundError):
            os.stat(f"{stem}.log", dir_fd=logs, follow_symlinks=False)
            return False  # it ran here
        os.symlink(self._host, f"{stem}.host", dir_fd=logs)
        return True


def _write(file: int, part: LogPart) -> None:
    os.ftruncate(file, part.start)  # what is behind it was there before a truncation
    data = memoryview(part.data)
    while data:
        data = data[os.pwrite(file, data, part.start + len(part.data) - len(data)) :]
    if part.begin:
        # A block beyond the end goes with it: otherwise the last one would not become a hole.
        is_all_gone = part.begin == part.start + len(part.data)
        with suppress(OSError):  # this file system has no holes
            fallocate(file, KEEP_SIZE | PUNCH_HOLE, 0, part.begin + BLOCK_BYTES * is_all_gone)
