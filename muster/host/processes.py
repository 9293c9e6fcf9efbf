"""Processes of this machine: identity, state, signals that cannot hit a reused pid.

A pid alone is ambiguous because the kernel reuses it. Processes are therefore identified by
(pid, pid namespace, start time, boot id), and signals go through a pidfd that is opened first and
checked second. psutil is not used: it rounds the start time, and its process walk takes twice as
long.
"""

import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Final

from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import LIFELINE_FD, STANDBY
from muster.host.files import closing

_PROC: Final = Path("/proc")

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

# Fields of /proc/PID/stat, counted after the command name, which may contain blanks.
_STATE_FIELD: Final = 0
_PARENT_FIELD: Final = 1
_GROUP_FIELD: Final = 2
_THREADS_FIELD: Final = 17
_START_TICKS_FIELD: Final = 19


def adopt_orphans() -> None:
    """Have orphans among our descendants become our children instead of init's. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def follow_parent(number: signal.Signals) -> None:
    """Have the kernel send us this signal when our parent ends. Raises OSError."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def module_command(module: str, *words: str, python: str | None = None) -> list[str]:
    """Return the argv that runs one of our modules; `python` is another interpreter than ours."""
    # `muster` finds the packages of the services. Its own modules run a user's program, and must
    # not have that folder on their path.
    finder = [] if module.startswith("muster.") else ["muster"]
    return [python or sys.executable, "-P", "-m", *finder, module, *words]


@cache
def boot_id() -> str:
    """Return the identifier of the machine's current boot."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def since_boot() -> float:
    """Return seconds that go on while the machine is suspended: others do not wait for it."""
    # Darwin has no such clock of its own: its monotonic one goes on.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@cache
def machine_id() -> str:
    """Return the identifier of the machine's installation; empty if it has none."""
    with suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return ""


@cache
def pid_namespace() -> int:
    """Return the inode of our pid namespace: every container counts its own pids."""
    return (_PROC / "self/ns/pid").stat().st_ino


def identify(pid: int, *, or_zombie: bool = False) -> ProcessRecord | None:
    """Return the process that has `pid` now; None if there is none or, by default, a zombie."""
    fields = _stat(pid)
    if fields is None or (_has_ended(fields) and not or_zombie):
        return None
    return ProcessRecord(
        pid=pid,
        start_ticks=int(fields[_START_TICKS_FIELD]),
        boot_id=boot_id(),
        node=platform.node(),
        pid_namespace=pid_namespace(),
    )


def _has_ended(fields: list[str]) -> bool:
    """Return whether a process can be waited for.

    While other threads run or return memory, only its main thread has ended, and shows Z already.
    """
    return fields[_STATE_FIELD] in {"Z", "X"} and int(fields[_THREADS_FIELD]) <= 1


def this_process() -> ProcessRecord:
    """Return the record of the calling process."""
    record = identify(os.getpid())
    if record is None:
        raise RuntimeError("cannot read /proc/self: check that /proc is mounted")
    return record


def is_running(record: ProcessRecord) -> bool:
    """Return whether exactly this process still runs on this machine and boot."""
    found = identify(record.pid) if _is_visible(record) else None
    return found is not None and found.start_ticks == record.start_ticks


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP) has stopped this process; False under a debugger."""
    fields = _stat(pid)
    return fields is not None and fields[_STATE_FIELD] == "T"


def is_provably_gone(record: ProcessRecord) -> bool:
    """Return whether this process cannot be running any more.

    False for a process of another machine, boot or container, as this one cannot look there.
    """
    return _is_visible(record) and not is_running(record)


def _is_visible(record: ProcessRecord) -> bool:
    # Not by the host's name, which two machines may share and one may change. Nor by the namespace
    # alone: the first one has the same number on every machine.
    return record.pid_namespace == pid_namespace() and record.boot_id == boot_id()


def shares_network(pid: int) -> bool:
    """Return whether our 127.0.0.1 is also that of this process; True if we may not look."""
    try:
        return (_PROC / f"{pid}/ns/net").samefile(_PROC / "self/ns/net")
    except OSError:
        return True


def read_stat(record: ProcessRecord) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, of a process that may be a zombie."""
    fields = _stat(record.pid)
    is_same = fields is not None and int(fields[_START_TICKS_FIELD]) == record.start_ticks
    return fields if is_same else None


def send_signal(record: ProcessRecord, number: signal.Signals) -> bool:
    """Send a signal to exactly this process; return False if it is gone.

    Raises `PermissionError` if it belongs to another user.
    """
    try:
        with closing(os.pidfd_open(record.pid)) as pidfd:
            # The pidfd pins one process. Check after opening it that this is the right one.
            if not is_running(record):
                return False
            signal.pidfd_send_signal(pidfd, number)
    except (ProcessLookupError, FileNotFoundError):  # the latter: a thread has this number now
        return False
    return True


def kill(record: ProcessRecord) -> bool:
    """Send SIGKILL to exactly this process; return whether it was sent.

    A process of another user, started through sudo for example, is left alone.
    """
    try:
        return send_signal(record, signal.SIGKILL)
    except PermissionError:
        return False


def process_tree(heads: Iterable[ProcessRecord]) -> list[ProcessRecord]:
    """Return those of `heads` that run, and their descendants."""
    running = {head.pid for head in heads if is_running(head)}
    pids = running | set(descendants(*running)) if running else running
    return [record for pid in pids if (record := identify(pid)) is not None]


def descendants(*pids: int) -> list[int]:
    """Return the pids below these, parents before children."""
    children: dict[int, list[int]] = {}
    for candidate in all_pids():
        fields = _stat(candidate)
        if fields is not None:
            children.setdefault(int(fields[_PARENT_FIELD]), []).append(candidate)
    found: list[int] = []
    level = [child for parent in pids for child in children.get(parent, [])]
    while level:
        found += level
        level = [child for parent in level for child in children.get(parent, [])]
    return found


def all_pids() -> Iterator[int]:
    """Yield the pid of every process that this one can see."""
    with os.scandir(_PROC) as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def running_in_group(group: int) -> list[int]:
    """Return the pids of a process group."""
    return [
        pid
        for pid in all_pids()
        if (fields := _stat(pid)) is not None
        and int(fields[_GROUP_FIELD]) == group
        and not _has_ended(fields)
    ]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it cannot be read."""
    pairs = (entry.partition(b"=") for entry in read_environment(pid).split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs if name}


def read_environment(pid: int) -> bytes:
    """Return the same as bytes, with a zero before each ``NAME=value``."""
    try:
        with FileIO(f"{_PROC}/{pid}/environ") as file:
            return b"\0" + file.readall()
    except OSError:
        return b""


def _stat(pid: int) -> list[str] | None:
    # FileIO costs half of Path.read_text, and every exit of a rank reads all processes.
    try:
        with FileIO(f"{_PROC}/{pid}/stat") as file:
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].decode().split()


class ProcessorWait:
    """For how long the threads of some processes could run, but no processor was free for them.

    Counts from when this is made; the greatest wait of a thread counts. The kernel's `schedstat` of
    a process is that of its main thread alone. Where it counts no waits, this is always 0.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._first = _waits_of(pids)

    @property
    def seconds(self) -> float:
        waits = _waits_of(self._pids).items()
        grown = (wait - self._first.get(task, 0) for task, wait in waits)
        return max(grown, default=0) / 1e9


def counts_waits() -> bool:
    """Return whether the kernel counts how long a process waits for a processor."""
    return any(_waits_of([os.getpid()]).values())


def _waits_of(pids: Iterable[int]) -> dict[str, int]:
    """Return the waits of all threads in nanoseconds, by the path of the thread."""
    found: dict[str, int] = {}
    for file in (file for pid in pids for file in (_PROC / str(pid)).glob("task/*/schedstat")):
        with suppress(OSError, IndexError):  # the thread has ended meanwhile
            found[str(file)] = int(file.read_bytes().split()[1])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PollLimit:
    """How long to repeat a check, and the pause between two checks."""

    seconds: float
    pause_seconds: float

    def poll(self, count: Callable[[], int]) -> int:
        """Call `count` until it returns 0 or the time is over; return its last result.

        The calling thread sleeps in between.
        """
        deadline = time.monotonic() + self.seconds
        while (left := count()) and time.monotonic() <= deadline:
            time.sleep(self.pause_seconds)
        return left


# A service exits with the process that started it: `muster up` hands down the read end of a pipe,
# and the pipe closes when `muster up` ends for whatever reason. PR_SET_PDEATHSIG would not do: it
# fires when the starting *thread* ends.


def exit_with_parent(environ: Mapping[str, str]) -> None:
    """Send SIGINT to this process when the pipe named in the environment closes, if one is.

    In a household SIGTERM: the coordinator of another node takes over what runs.
    """
    text = environ.get(LIFELINE_FD)
    if text is not None:
        descriptor = int(text)
        number = signal.SIGTERM if environ.get("MUSTER_NODES") else signal.SIGINT
        os.set_inheritable(descriptor, False)  # noqa: FBT003  the standard library's signature

        def interrupt_at_end() -> None:
            while os.read(descriptor, 1):
                pass
            os.kill(os.getpid(), number)

        threading.Thread(target=interrupt_at_end, name="parent-pipe", daemon=True).start()


def await_start(environ: Mapping[str, str]) -> None:
    """Return once this service may begin, at once if it is no stand-by; exit if it never may."""
    if environ.get(STANDBY) and not os.read(sys.stdin.fileno(), 1):
        sys.exit(0)


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Start a service inside: it inherits a blocked SIGINT, which stays pending until unblocked.

    Otherwise a Ctrl-C during its imports would skip the service's own shutdown.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        # Unblock instead of restoring the old mask: two blocks may overlap on one event loop.
        unblock_sigint()


def unblock_sigint() -> None:
    """Accept SIGINT from now on, including one that is already pending."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
