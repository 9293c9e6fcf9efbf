"""Limits that our processes change for themselves, and those that a container or allocation sets.

Shells allow 1024 open files, too few for an agent of hundreds of ranks. But select() fails with
descriptors above 1023, so programs must not inherit a raised limit. Our files are for our user
alone; those of a program are as open as the user's umask allows.

A container or an allocation of Slurm gets a part of the machine: by the processors on which it may
run, and by quotas of its cgroups, which the number of processors does not show.
"""

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Self

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")


class ShellLimits(NamedTuple):
    """RLIMIT_NOFILE and the umask of a process."""

    soft: int
    hard: int
    umask: int = -1  # unchanged, as for `Popen`

    @classmethod
    def replaced(cls) -> Self:
        """Raise this process's limit on open files and close its umask; return what was before."""
        before = cls(*resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0o077))
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before.hard, before.hard))
        return before

    def apply_to(self, pid: int) -> None:
        """Set the limit on open files of a process that has just started."""
        with suppress(OSError):  # it has exited already, or belongs to another user by now
            resource.prlimit(pid, resource.RLIMIT_NOFILE, self[:2])


def cgroup_files(
    name: str, old_name: str, membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS
) -> Iterator[Path]:
    """Yield a file of our cgroup and of each one above it that has it.

    `old_name` is that of cgroup v1, which begins with the controller. A container may see its own
    cgroup in place of the uppermost one, whatever its path is called.
    """
    controller = old_name.partition(".")[0]
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top, file = (cgroups / controller, old_name) if controllers else (cgroups, name)
            own = top / place.lstrip("/")
            ours = (group / file for group in (own, *own.parents) if group.is_relative_to(top))
            yield from filter(Path.is_file, ours)


def usable_processors(membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> int:
    """Return how many processors this process may keep busy; a part of one counts as one."""
    count = len(os.sched_getaffinity(0))
    for file in cgroup_files("cpu.max", "cpu.cfs_quota_us", membership, cgroups):
        period = file.with_name("cpu.cfs_period_us")  # of v2 in the same file
        words = file.read_text() + (period.read_text() if period.is_file() else "")
        quota_us, period_us = words.split()
        if quota_us.isdecimal():  # neither "max" nor -1
            count = min(count, math.ceil(int(quota_us) / int(period_us)))
    return max(count, 1)


def usable_memory_mb() -> int:
    """Return how many MiB the processes of our cgroup may have together on this machine."""
    ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([ram_bytes, *(limit for limit, _ in memory_limits())]) >> 20


def memory_limits(
    membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS
) -> Iterator[tuple[int, int]]:
    """Yield how many bytes each of our cgroups may have, and how many of them are available."""
    for file in cgroup_files("memory.max", "memory.limit_in_bytes", membership, cgroups):
        used = "memory.current" if file.name == "memory.max" else "memory.usage_in_bytes"
        with suppress(OSError):  # not every container shows all files
            if not (limit := file.read_text().strip()).isdecimal():
                continue
            stat = file.with_name("memory.stat").read_text().split()
            numbers = dict(zip(stat[::2], stat[1::2], strict=True))
            # What the kernel takes back first; v1 counts the cgroups below in another line.
            cached = numbers.get("total_inactive_file") or numbers.get("inactive_file", "0")
            yield int(limit), int(limit) - int(file.with_name(used).read_text()) + int(cached)
