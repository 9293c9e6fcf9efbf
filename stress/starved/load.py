"""Processes that take the processors away from ranks, and how much that starves them."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

from muster.host.containment import cgroup_of, tag_of
from muster.host.processes import descendants

BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""It ends with the process that started it, however that ends."""

CPU_CGROUPS = Path("/sys/fs/cgroup/cpu")
LOOK_SECONDS = 2.0
ALL_THE_TIME = 0.95
"""Share of a look in which a thread ran or waited, if it never slept."""

NANOSECONDS = 1e9


@contextmanager
def starving(load: int, services: Iterable[int]) -> Iterator[None]:
    """Keep so many processes busy beside the services and all that these start.

    They share a cgroup with them, so that no other process is starved. Where none can be made, each
    busy process has a session of its own: in one session, autogroup would give all of them together
    as much as a single rank.
    """
    with ExitStack() as stack:
        cgroup = CPU_CGROUPS / f"starved-{os.getpid()}"
        with suppress(OSError):
            cgroup.mkdir()
            stack.callback(_remove, cgroup)
            for service in services:
                for pid in (service, *descendants(service)):
                    (cgroup / "cgroup.procs").write_text(str(pid))
        for _ in range(load):
            busy = subprocess.Popen([sys.executable, "-S", "-c", BUSY], start_new_session=True)
            stack.callback(stack.enter_context(busy).kill)
            with suppress(OSError):
                (cgroup / "cgroup.procs").write_text(str(busy.pid))
        yield


def _remove(cgroup: Path) -> None:
    while members := (cgroup / "cgroup.procs").read_text().split():
        for pid in members:
            with suppress(ProcessLookupError):
                (cgroup.parent / "cgroup.procs").write_text(pid)
    cgroup.rmdir()


class WaitShares:
    """Watches how long threads that want to run have to wait, in a thread of its own."""

    def __init__(self, ranks: Callable[[], Iterable[int]]) -> None:
        self._ranks = ranks
        self._is_over = threading.Event()
        self._shares: list[float] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> float:
        """Return the median share of waiting, of the ranks' threads that wanted to run."""
        self._is_over.set()
        self._thread.join()
        return median(self._shares) if self._shares else 0.0

    def _watch(self) -> None:
        before: dict[tuple[int, str], tuple[int, int]] = {}
        looked_at = 0.0
        while not self._is_over.wait(LOOK_SECONDS):
            pids = [*self._ranks()]
            seconds, looked_at = time.monotonic() - looked_at, time.monotonic()
            now = {
                (pid, task.parent.name): times
                for pid in pids
                for task in Path(f"/proc/{pid}/task").glob("*/schedstat")
                if (times := _times(task))
            }
            for task in now.keys() & before.keys():
                ran, waited = (new - old for new, old in zip(now[task], before[task], strict=True))
                if ran + waited >= ALL_THE_TIME * seconds * NANOSECONDS:
                    self._shares.append(waited / (ran + waited))
            before = now


def can_freeze() -> bool:
    """Return whether ranks have a cgroup of their own here."""
    cgroup = cgroup_of("of any rank")
    return cgroup is not None and os.access(cgroup.parent, os.W_OK)


def freeze(pid: int) -> None:
    """Freeze a rank with all that it has started, as a container is paused."""
    cgroup = cgroup_of(tag_of(pid) or "")
    assert cgroup is not None
    (cgroup / "cgroup.freeze").write_text("1")


def _times(task: Path) -> tuple[int, int] | None:
    """Return how long a thread has run, and waited for a processor; None if it has ended."""
    with suppress(OSError):
        ran, waited, _ = map(int, task.read_text().split())
        return ran, waited
    return None
