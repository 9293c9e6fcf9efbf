"""Processes by their true names: who runs, who is gone, and signals that never hit a stranger.

A pid alone is a guess: the kernel uses it again. Everything here goes by (pid, start ticks, boot
id), and signals go through a pidfd that is opened first and checked second.
"""

import os
import platform
import signal
from collections.abc import Callable, Container, Iterable, Iterator
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Final

from muster.brand import brand_of, brands
from muster.contracts.environ import MARK
from muster.contracts.process import ProcessRecord
from muster.sight import require_descriptors

_PROC: Final = Path("/proc")
_STATE_FIELD: Final = 0
_PARENT_FIELD: Final = 1
_SESSION_FIELD: Final = 3
_START_TICKS_FIELD: Final = 19
"""Fields of /proc/PID/stat counted after the command name, which may itself hold blanks."""


@cache
def boot_id() -> str:
    """Return what tells this boot of this machine from every other."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessRecord | None:
    """Return the process that has `pid` now; None if there is none or it is a zombie."""
    fields = _stat(pid)
    if fields is None or fields[_STATE_FIELD] in {"Z", "X"}:
        return None
    return ProcessRecord(
        pid=pid,
        start_ticks=int(fields[_START_TICKS_FIELD]),
        boot_id=boot_id(),
        node=platform.node(),
    )


def myself() -> ProcessRecord:
    """Return the record of the calling process; raises OSError if it has no descriptor to look."""
    record = identify(os.getpid())
    if record is None:
        require_descriptors(1)
        raise RuntimeError("/proc does not know this process: is it mounted?")
    return record


def is_running(record: ProcessRecord) -> bool:
    """Return whether exactly this process still runs on this machine and boot."""
    return identify(record.pid) == record


def stands_still(pid: int) -> bool:
    """Return whether this process was stopped by a signal (SIGSTOP) and not told to go on.

    One that a debugger holds does not: it is looked after.
    """
    fields = _stat(pid)
    return fields is not None and fields[_STATE_FIELD] == "T"


def stat_of(record: ProcessRecord) -> list[str] | None:
    """Return what /proc says of exactly this process, which may be a zombie, after its name."""
    fields = _stat(record.pid)
    is_meant = fields is not None and int(fields[_START_TICKS_FIELD]) == record.start_ticks
    return fields if is_meant else None


def is_provably_gone(record: ProcessRecord) -> bool:
    """Return whether this process cannot be running any more.

    False for a process of another machine: not knowing is no proof. After a reboot of this machine
    its old processes are gone; the node's name decides whether it is this machine.
    """
    return record.node == platform.node() and not is_running(record)


def send_signal(record: ProcessRecord, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; return False if it is gone.

    Raises `PermissionError` if it is another user's.
    """
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor now holds one process; only if that is ours may it be signalled.
        if identify(record.pid) != record:
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def kill(record: ProcessRecord) -> bool:
    """Kill exactly this process; return whether it was there, and ours to kill.

    A rank may have started what is another user's, through sudo: that is let be.
    """
    try:
        return send_signal(record, signal.SIGKILL)
    except PermissionError:
        return False


def marked(prefix: str) -> list[ProcessRecord]:
    """Return the processes of this machine that wear a brand of `prefix`, or have it as `MARK`.

    Both are inherited by everything a rank starts, whatever session it moves to; the mark can be
    wiped off, and is all that processes have that are no rank's. `prefix` ends where a part ends.
    """
    wanted = brands(prefix)

    def is_meant(pid: int) -> bool:
        return brand_of(pid) in wanted or (mark_of(pid) or "").startswith(prefix)

    return list(_surely(is_meant))


def branded(wanted: Container[int]) -> Iterator[ProcessRecord]:
    """Yield the processes of this machine that wear a brand that is `wanted`, as they are found."""
    return _surely(lambda pid: brand_of(pid) in wanted)


def family(heads: Iterable[ProcessRecord]) -> list[ProcessRecord]:
    """Return those of `heads` that run, everything below them, and everybody of their sessions.

    Whatever a program does to its environment, it stays below its parent or in its session, unless
    it leaves both.
    """
    running = {head.pid for head in heads if is_running(head)}
    if not running:
        return []
    pids = running | set(_below(running))
    for pid in _pids():
        fields = _stat(pid)
        if fields is not None and int(fields[_SESSION_FIELD]) in running:
            pids.add(pid)
    return [record for pid in pids if (record := identify(pid)) is not None]


def descendants(pid: int) -> list[int]:
    """Return the pids below `pid`, parents before children."""
    return _below([pid])


def _below(pids: Iterable[int]) -> list[int]:
    children: dict[int, list[int]] = {}
    for candidate in _pids():
        fields = _stat(candidate)
        if fields is not None:
            children.setdefault(int(fields[_PARENT_FIELD]), []).append(candidate)
    found: list[int] = []
    generation = [child for parent in pids for child in children.get(parent, [])]
    while generation:
        found += generation
        generation = [child for parent in generation for child in children.get(parent, [])]
    return found


def mark_of(pid: int) -> str | None:
    """Return the mark in the environment a process was started with; None if it has none."""
    start = f"{MARK}=".encode()
    for entry in _entries(pid):
        if entry.startswith(start):
            return entry[len(start) :].decode(errors="replace").rstrip()
    return None


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment a process was started with; empty if it is not to be had."""
    pairs = (entry.partition(b"=") for entry in _entries(pid))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}


def _entries(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _surely(is_meant: Callable[[int], bool]) -> Iterator[ProcessRecord]:
    for pid in _pids():
        if not is_meant(pid):
            continue
        # Identified before and after: it is then this process that is meant, and no successor.
        record = identify(pid)
        if record is not None and is_meant(pid) and is_running(record):
            yield record


def _pids() -> Iterator[int]:
    with os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def _stat(pid: int) -> list[str] | None:
    # Not by way of a Path, at half the cost: when one process ends, all of them are looked at.
    try:
        with FileIO(f"{_PROC}/{pid}/stat") as file:
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].decode().split()
