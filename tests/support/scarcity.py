"""Real shortages: file descriptors of a process, and space on a disk."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def no_descriptors(pid: int = 0, *, but: int = 0) -> Iterator[None]:
    """Let a process (0: this one) open nothing while inside, `but` for so many files.

    A new descriptor has the lowest number that is free, and none is free below the limit.
    """
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid or 'self'}/fd")}  # noqa: PTH208  names
    if not pid:
        taken -= {number for number in taken if not _is_open(number)}  # that of the look itself
    free = (number for number in range(before[0]) if number not in taken)
    limit = [next(free) for _ in range(but + 1)][-1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Make a directory a file system of 256 KiB while inside, or skip."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no small disk can be had: {tried.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)  # noqa: S607  as for mount


def allow_no_more_files(directory: Path) -> None:
    """Let a `small_disk` hold as many files as it has now, and no other."""
    room = os.statvfs(directory)
    limit = f"remount,nr_inodes={room.f_files - room.f_ffree}"
    subprocess.run(["mount", "-o", limit, str(directory)], check=True)  # noqa: S607  as above


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
