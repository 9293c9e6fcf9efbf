"""Find and kill everything that one attempt of a rank has started, and nothing else.

A rank enters containment before the first line of its program runs. Its descendants are found by:

1. a cgroup (v2) per attempt, where this process may create one: root, or a delegated systemd unit;
2. the process tag ``job uid/rank/attempt``. The variable `PROCESS_TAG` holds it as text, which
   ``env -i`` removes. RLIMIT_LOCKS holds it as a number: Linux keeps and inherits that limit across
   fork and exec but has ignored it since 2.4. Lowering the hard limit as well makes it permanent.

A later agent or coordinator needs no other record.
"""

import ctypes
import math
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.names import PROCESS_TAG, PROCESS_TAG_WIDTH
from muster.host.processes import (
    PollLimit,
    all_pids,
    descendants,
    identify,
    is_running,
    kill,
    process_tree,
    read_environment,
)

LIMIT: Final = 10  # RLIMIT_LOCKS, which the standard library does not name

_COUNTS: Final = (1 << 12, 1 << 10)
"""Ranks, attempts. Attempts wrap around: those a thousand apart never run at the same time."""
_JOB_BYTES: Final = 5  # two of a thousand jobs collide with a probability of 1 in 2 million
_LOWEST: Final = 1 << 62  # above every limit that a person would set

_ENV_START_FIELD: Final = 47
"""Of /proc/self/stat, counted after the command name."""

KILL_LIMIT: Final = PollLimit(seconds=0.05, pause_seconds=0.001)
"""Killed processes disappear within a few milliseconds, and the agent's loop waits meanwhile."""

SWEEP_PATIENCE: Final = PollLimit(seconds=2.0, pause_seconds=0.01)
"""A process that survives SIGKILL for longer hangs in the kernel: waiting would not end."""


def contain_self(tag: str) -> None:
    """Tag this process and its future descendants with `tag`, and put them into its cgroup."""
    set_tag_limit(tag)
    cgroup = cgroup_of(tag)
    if cgroup is not None:
        with suppress(OSError):  # not delegated: the tag alone has to do
            cgroup.mkdir(exist_ok=True)
            try:
                (cgroup / "cgroup.procs").write_text("0")
            except OSError:
                cgroup.rmdir()


def retag(tag: str) -> None:
    """Replace the tag of a spare process, and of what its program has started, by an attempt's.

    `contain_self` does the rest; the kernel takes 15 ms to move a process into a cgroup.
    """
    own, present, number = os.getpid(), tag_number_of(os.getpid()), tag_numbers(tag).start
    for pid in all_pids() if can_tag() else ():
        if pid != own and tag_number_of(pid) == present:
            with suppress(OSError):  # it has exited
                resource.prlimit(pid, LIMIT, (number, number))
    overwrite_tag(tag)
    set_tag_limit(tag)


def overwrite_tag(tag: str) -> None:
    """Replace the process tag of this process, also in /proc/PID/environ.

    The kernel shows the memory that exec filled, which a fork inherits. The present tag is
    `PROCESS_TAG_WIDTH` long, so that every tag fits.
    """
    os.environ[PROCESS_TAG] = tag
    offset = Path("/proc/self/environ").read_bytes().index(f"{PROCESS_TAG}=".encode())
    stat = Path("/proc/self/stat").read_text()
    env_start = int(stat[stat.rindex(")") + 2 :].split()[_ENV_START_FIELD])
    place = env_start + offset + len(PROCESS_TAG) + 1
    ctypes.memmove(place, tag.ljust(PROCESS_TAG_WIDTH).encode(), PROCESS_TAG_WIDTH)


def is_contained(pid: int, tag: str) -> bool:
    """Return whether the process has the tag's number; True where tag limits cannot be set."""
    return not can_tag() or tag_number_of(pid) in tag_numbers(tag)


def kill_attempt(tag: str) -> bool:
    """Kill an attempt and everything it has started; return whether nothing of it runs any more.

    False if a process hangs in the kernel: call again later. Zombies do not count.
    """

    def kill_each() -> int:
        cgroup = cgroup_of(tag)
        cgroups_left = int(cgroup is not None and not kill_cgroup(cgroup))
        # Kill each process as soon as it is found: it could fork while a list is being made.
        return cgroups_left + sum(kill(record) for record in _members(tag))

    return KILL_LIMIT.poll(kill_each) == 0


def kill_job(job_uid: str, known: Sequence[ProcessRecord]) -> int:
    """Kill tagged and known processes and their descendants; return how many do not disappear."""
    members = list(known)

    def kill_all() -> int:
        # Find all of them first: killing a parent hides its descendants.
        found = process_tree([*tagged_processes(f"{job_uid}/"), *members])
        members[:] = [record for record in found if kill(record)]
        return len(members) + sum(not kill_cgroup(cell) for cell in cgroups_of_job(job_uid))

    return SWEEP_PATIENCE.poll(kill_all)


def tagged_processes(prefix: str) -> list[ProcessRecord]:
    """Return the processes whose tag starts with `prefix`, which ends where a part of it ends."""
    numbers = tag_numbers(prefix)

    def is_match(pid: int) -> bool:
        return tag_number_of(pid) in numbers or (tag_of(pid) or "").startswith(prefix)

    return list(_matching(is_match))


def tag_of(pid: int) -> str | None:
    """Return the tag in the environment that a process was started with; None without one."""
    # Not through `environment_of`: every start of an agent looks at all processes.
    _, found, after = read_environment(pid).partition(f"\0{PROCESS_TAG}=".encode())
    return os.fsdecode(after.partition(b"\0")[0]).rstrip() if found else None


def tag_numbers(tag: str) -> range:
    """Return the numbers of a job's, a rank's or one attempt's tag; empty for any other tag."""
    job, *place = tag.rstrip("/").split("/")
    if len(place) > len(_COUNTS) or not all(part.isdecimal() for part in place):
        return range(0)
    size = math.prod(_COUNTS)
    digest = blake2b(job.encode(), digest_size=_JOB_BYTES).digest()
    first = _LOWEST | int.from_bytes(digest) * size
    for part, count in zip(place, _COUNTS, strict=False):
        size //= count
        first += int(part) % count * size
    return range(first, first + size)


def tag_number_of(pid: int) -> int:
    """Return the process's RLIMIT_LOCKS: a tag number, another limit, or 0 if unreadable."""
    try:
        return resource.prlimit(pid, LIMIT)[0]
    except (ProcessLookupError, PermissionError):
        return 0


def can_tag() -> bool:
    """Return whether the limit is free; False inside another job's rank, whose tag must stay."""
    return resource.getrlimit(LIMIT)[1] == resource.RLIM_INFINITY


def set_tag_limit(tag: str, *, is_final: bool = True) -> None:
    """Set the number of one attempt's tag for this process and its descendants, if it is free."""
    if can_tag():
        number = tag_numbers(tag).start
        resource.setrlimit(LIMIT, (number, number if is_final else resource.RLIM_INFINITY))


def cgroup_of(tag: str) -> Path | None:
    """Return the directory of the tag's cgroup, existing or not; None without cgroup v2."""
    hierarchy = _hierarchy()
    if hierarchy is None:
        return None
    root, mount = hierarchy
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        name = line.removeprefix("0::")
        if name != line and Path(name).is_relative_to(root):
            return mount / Path(name).relative_to(root) / cgroup_name(tag)
    return None


def cgroup_name(tag: str) -> str:
    """Return the last part of the path of a tag's cgroup."""
    return f"muster-{tag.replace('/', '-')}"


def cgroups_of_job(job_uid: str) -> Iterator[Path]:
    """Yield every cgroup of a job; an earlier agent may have created them elsewhere."""
    hierarchy = _hierarchy()
    if hierarchy is not None:
        start = cgroup_name(f"{job_uid}/")
        for directory, children, _ in os.walk(hierarchy[1]):
            yield from (Path(directory, name) for name in children if name.startswith(start))


def kill_cgroup(cgroup: Path) -> bool:
    """Kill the members of a cgroup and remove it; return whether it is gone.

    False if killed processes have not disappeared yet: call again.
    """
    with suppress(OSError):  # gone already, or a kernel before 5.14 without cgroup.kill
        (cgroup / "cgroup.kill").write_text("1")
    with suppress(OSError):
        for directory, _, _ in os.walk(cgroup, topdown=False):
            Path(directory).rmdir()
    return not cgroup.exists()


@cache
def _hierarchy() -> tuple[str, Path] | None:
    """Return the root cgroup of the cgroup2 mount, and its mount point."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            _, _, _, root, mount, *_ = fields.split()
            return root, Path(mount)
    return None


def _members(tag: str) -> Iterator[ProcessRecord]:
    if can_tag():
        numbers = tag_numbers(tag)
        yield from _matching(lambda pid: tag_number_of(pid) in numbers)
        return
    # The environment alone may be a copy, so it counts only for our own descendants.
    for pid in descendants(os.getpid()):
        if tag_of(pid) == tag and (record := identify(pid)) is not None:
            yield record


def _matching(is_match: Callable[[int], bool]) -> Iterator[ProcessRecord]:
    for pid in all_pids():
        if not is_match(pid):
            continue
        # Match again after identifying: the pid may have been reused in between.
        record = identify(pid)
        if record is not None and is_match(pid) and is_running(record):
            yield record
