"""A disk that runs out of space or of inodes."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(directory: Path, size: str = "256k") -> Iterator[None]:
    """Make a directory a file system of so many bytes while inside, or skip."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    tried = subprocess.run(mount, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"no small disk can be had: {tried.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)  # noqa: S607  as for mount


@contextmanager
def filled(directory: Path) -> Iterator[None]:
    """Leave no free byte on a `small_disk` while inside."""
    filling = directory / "filling"
    with filling.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filling.unlink()


def allow_no_more_files(directory: Path) -> None:
    """Let a `small_disk` hold as many files as it has now, and no other."""
    room = os.statvfs(directory)
    limit = f"remount,nr_inodes={room.f_files - room.f_ffree}"
    subprocess.run(["mount", "-o", limit, str(directory)], check=True)  # noqa: S607  as above
