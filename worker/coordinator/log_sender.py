"""Sends the logs of ranks to another host, the coordinator's: a thread of the storage process.

It has a connection of its own: the lines of all ranks delay no heartbeat. It tells only what is in
the files, so nothing is lost with it: its successor, or itself on the next connection, first gets
what the coordinator has.

The agent notes each truncation of a log in its time index (`worker.ranks.log_index`).
Until that note, the sender may mistake new lines for the continuation of old ones; once it sees
the note, it sends the log anew. Of each log, bytes go before the time marks that cover them.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.contracts.messages.agent import LogHello
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.logs import (
    PART_BYTES,
    BatchKept,
    BatchSent,
    DrainLogs,
    Kind,
    LogPart,
    LogsAtCoordinator,
    LogsDrained,
    ReceiverMessage,
    SenderMessage,
)
from muster.contracts.messages.wire import decode_receiver_message, encode
from muster.contracts.settings.paths import LOG_EPOCH_BYTES, TIME_MARK, JobFiles, LogName
from muster.host import files as host_files
from muster.links.reconnect import LINK_ERRORS, Reconnect
from muster.logs.log_file import open_log
from worker.coordinator.link import AddressFile, ThreadLink

PASS_SECONDS: Final = 0.25  # between two passes over all files, as often as the agent notes times
PAUSE_FACTOR: Final = 10  # with many files a pass takes longer, and its pause so many times that

BATCH_BYTES: Final = 4 * PART_BYTES  # may be sent and not kept yet
RETRY_SECONDS: Final = 0.5


class Channel:
    """The conversation of `muster.contracts.messages.logs` on a link, which raises its errors."""

    def __init__(self, own: AgentAssignment) -> None:
        self.is_asked_to_drain = False
        self._unkept_bytes = 0
        owner = JobFiles(Path(own.job_root)).owner.stat()
        hello = LogHello(directory=(owner.st_ino, owner.st_mtime_ns))
        file = AddressFile(own)
        self._link = ThreadLink(own, hello, file.take(), file)

    def sizes_at_coordinator(self) -> dict[tuple[LogName, Kind], int]:
        """Return what the coordinator says first."""
        sizes: dict[tuple[LogName, Kind], int] = {}
        while isinstance(message := self.receive(), LogsAtCoordinator):
            sizes |= {(LogName(rank, attempt), kind): n for rank, attempt, kind, n in message.sizes}
            if message.is_last:
                break
        return sizes

    def send(self, message: SenderMessage) -> None:
        """Send; after every `BATCH_BYTES` return only once all of them are kept."""
        self._link.send(encode(message))
        if isinstance(message, LogPart):
            self._unkept_bytes += len(message.data) + 1
            if self._unkept_bytes >= BATCH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Return once everything that was sent is kept."""
        if self._unkept_bytes:
            self.send(BatchSent())
            while not isinstance(self.receive(), BatchKept):
                pass
            self._unkept_bytes = 0

    def receive(self) -> ReceiverMessage:
        message = decode_receiver_message(self._link.receive())
        self.is_asked_to_drain |= isinstance(message, DrainLogs)
        return message

    def wait(self, seconds: float) -> None:
        """Wait, at most until a message has come."""
        if self._link.has_news(seconds):
            self.receive()

    def close(self) -> None:
        self._link.close()


@dataclass(slots=True)
class _Sent:
    """How far one attempt's files were sent."""

    log: int | None = None  # None: not even its existence is known
    times: int = 0
    begin: int = 0
    epoch: int | None = None  # of the log; None until the coordinator's marks were looked up
    has_exit: bool = False


class LogPasses:
    """Sends what is new in a job's files on one connection, pass by pass. No socket here."""

    def __init__(
        self,
        files: JobFiles,
        sizes: Mapping[tuple[LogName, Kind], int],
        send: Callable[[LogPart], None],
        part_bytes: int = PART_BYTES,
    ) -> None:
        """`sizes` are those of the coordinator. A part is as long as several time marks."""
        self._files = files
        self._send_part = send
        self._part_bytes = part_bytes
        self._sent: dict[LogName, _Sent] = defaultdict(_Sent)
        for (name, kind), size in sizes.items():
            match kind:
                case "log":
                    self._sent[name].log = size
                case "times":
                    self._sent[name].times = size - size % TIME_MARK.size
                case "exit":
                    self._sent[name].has_exit = True

    def send_new(self) -> bool:
        """Send of each file at most one part that is new; return whether more is there."""
        # An exit is recorded after the last line: found here, the log read below is complete.
        ended = set(_names(self._files.exits, ".exit"))
        names = sorted(ended.union(_names(self._files.logs, ".log")))
        left = [name for name in names if self._send_attempt(name, has_ended=name in ended)]
        return bool(left)

    def _send_attempt(self, name: LogName, *, has_ended: bool) -> bool:
        sent = self._sent[name]
        with ExitStack() as opened:
            try:
                times, log = (
                    opened.enter_context(host_files.closing(open_log(path)))
                    for path in (self._files.times(*name.key), self._files.log(*name.key))
                )
            except OSError:  # it was never started, or its program has put something else there
                pass
            else:
                if self._send_log(name, sent, times, log):
                    return True
        if has_ended and not sent.has_exit:
            sent.has_exit = True
            record = self._files.exit_record(*name.key).read_bytes()
            if len(record) <= PART_BYTES:
                self._send(name, "exit", 0, record)
        return False

    def _send_log(self, name: LogName, sent: _Sent, times: int, log: int) -> bool:
        """Send a part of a log and of its time marks; return whether there is more."""
        # The marks before the log: whatever they cover was written by then.
        marked = os.fstat(times).st_size // TIME_MARK.size * TIME_MARK.size
        epoch = _epoch(times, marked)
        if sent.epoch is None:
            sent.epoch = _epoch(times, min(sent.times, marked))
        size = os.fstat(log).st_size
        begin, start = _first_byte(log, size), sent.log or 0
        # Otherwise it was truncated, or a power cut has taken its end.
        is_grown = epoch == sent.epoch and start <= size and sent.times <= marked
        is_new = sent.log is None or not is_grown
        start = max(begin, start if is_grown else 0)
        data = os.pread(log, self._part_bytes, start)
        if data or is_new or begin > sent.begin:
            self._send(name, "log", start, data, begin)
        sent.epoch, sent.begin, sent.log = epoch, begin, start + len(data)
        has_marks_lost, sent.times = sent.times > marked, min(sent.times, marked)
        marks = os.pread(times, min(self._part_bytes, marked - sent.times), sent.times)
        covered = _covered(marks, epoch * LOG_EPOCH_BYTES + sent.log)
        if covered or has_marks_lost:
            self._send(name, "times", sent.times, covered)
            sent.times += len(covered)
        return sent.log < size or (bool(covered) and sent.times < marked)

    def _send(self, name: LogName, kind: Kind, start: int, data: bytes, begin: int = 0) -> None:
        self._send_part(
            LogPart(
                rank=name.rank,
                attempt=name.attempt,
                kind=kind,
                start=start,
                data=data,
                begin=begin,
            )
        )


def _names(directory: Path, suffix: str) -> Iterator[LogName]:
    with suppress(FileNotFoundError):  # nothing was written yet
        for path in directory.iterdir():
            name = LogName.parse(f"{path.stem}.log") if path.suffix == suffix else None
            if name is not None:
                yield name


def _epoch(times: int, end: int) -> int:
    """Return how often the log had been truncated by the last of the marks before `end`."""
    last = os.pread(times, TIME_MARK.size, end - TIME_MARK.size) if end else b""
    return int(TIME_MARK.unpack(last)[0]) // LOG_EPOCH_BYTES if last else 0


def _first_byte(log: int, size: int) -> int:
    try:
        return min(size, os.lseek(log, 0, os.SEEK_DATA))
    except OSError:  # there is only a hole, or nothing
        return size


def _covered(marks: bytes, end: int) -> bytes:
    """Return the first marks, as far as they cover nothing behind `end`."""
    count = 0
    for size, _ in TIME_MARK.iter_unpack(marks):
        if size > end:
            break
        count += 1
    return marks[: count * TIME_MARK.size]


def send_logs(own: AgentAssignment, is_ending: threading.Event) -> None:
    """Keep a connection to the coordinator and send what is new.

    Returns once everything is sent that was there when `is_ending` was set. While the coordinator
    is on this host, it reads the very files.
    """
    file = AddressFile(own)
    for _ in Reconnect(RETRY_SECONDS):
        if file.is_on_this_host:
            if is_ending.is_set():
                return
            continue
        with suppress(*LINK_ERRORS), closing(Channel(own)) as channel:
            _serve(channel, JobFiles(Path(own.job_root)), is_ending)
            return


def _serve(channel: Channel, files: JobFiles, is_ending: threading.Event) -> None:
    passes = LogPasses(files, channel.sizes_at_coordinator(), channel.send)
    while True:
        began = time.monotonic()
        is_last, is_draining = is_ending.is_set(), channel.is_asked_to_drain
        is_more = passes.send_new()
        channel.flush()
        if is_more:
            continue
        if is_draining:
            channel.send(LogsDrained())
            channel.is_asked_to_drain = False
        if is_last:
            return
        channel.wait(max(PASS_SECONDS, PAUSE_FACTOR * (time.monotonic() - began)))
