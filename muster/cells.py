"""Cells: a control group for each rank, where this process may make one.

The kernel keeps everything a rank starts in the rank's control group, and ends all of it at once,
however fast it forks. That takes cgroup v2 and a group of our own that we may write to: root has
it, and a user's services under systemd have. Where there is none, that is no error.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path


def enter_cell(mark: str) -> None:
    """Put the calling process and all that it will start into a cell, if there is one to be had."""
    cell = cell_of(mark)
    if cell is None:
        return
    with suppress(OSError):
        cell.mkdir(exist_ok=True)
        try:
            (cell / "cgroup.procs").write_text("0")
        except OSError:
            cell.rmdir()


def cell_of(mark: str) -> Path | None:
    """Return where the cell of `mark` is, or would be, in the control group of this process."""
    own = _own_group()
    return None if own is None else own / cell_name(mark)


def cell_name(mark: str) -> str:
    """Return what the cell of `mark` is called, in whatever group it is."""
    return f"muster-{mark.replace('/', '-')}"


def cells_of_job(job_uid: str) -> Iterator[Path]:
    """Yield every cell of a job, whoever made it: an agent may have lived in another group."""
    hierarchy = _hierarchy()
    if hierarchy is not None:
        start = cell_name(f"{job_uid}/")
        for directory, below, _ in os.walk(hierarchy[1]):
            yield from (Path(directory, name) for name in below if name.startswith(start))


def clear_cell(cell: Path) -> bool:
    """Kill who is in a cell and remove it; return whether it is gone.

    Killed processes need a moment to be gone: False says to call again.
    """
    with suppress(OSError):  # gone, or of a kernel older than 5.14, which cannot
        (cell / "cgroup.kill").write_text("1")
    with suppress(OSError):
        for directory, _, _ in os.walk(cell, topdown=False):
            Path(directory).rmdir()
    return not cell.exists()


@cache
def _hierarchy() -> tuple[str, Path] | None:
    """Return the group with which the mounted tree of control groups begins, and where it is."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            _, _, _, root, place, *_ = fields.split()
            return root, Path(place)
    return None


def _own_group() -> Path | None:
    hierarchy = _hierarchy()
    if hierarchy is None:
        return None
    root, place = hierarchy
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        name = line.removeprefix("0::")
        if name != line and Path(name).is_relative_to(root):
            return place / Path(name).relative_to(root)
    return None
