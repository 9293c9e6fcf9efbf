"""Is this machine one that Muster can run on?"""

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

from cli.accelerators import visible_gpus
from cli.findings import Check, Finding, problem, warning, well
from muster.cells import cell_of

PYTHON_WANTED: Final = (3, 11)

DESCRIPTORS_WANTED: Final = 4096
"""An agent holds a few for each rank, an API one for each stream and for each log that is read."""

DESCRIPTORS_LEAST: Final = 1024

TASKS_OF_A_RANK: Final = 20
"""Threads count as processes, and numerical libraries start some."""

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  looked at, not written
SHARED_MEMORY_WANTED_BYTES: Final = 1 << 30
"""Containers get 64 MiB unless told otherwise, too little for the workers of a torch DataLoader."""

MEMORY_WANTED_BYTES: Final = 1 << 30

UNLIMITED: Final = resource.RLIM_INFINITY


def machine_checks(slots: int) -> Iterator[Check]:
    """Yield what is to be looked at; `slots` is how many ranks are to run at once."""
    yield "kernel", _kernel
    yield "python", _python
    yield "packages", _packages
    yield "descriptors", _descriptors
    yield "processes", lambda: _processes(slots)
    yield "memory", _memory
    yield SHARED_MEMORY, _shared_memory
    yield "cgroups", _cells
    yield "torch", _torch


def _kernel() -> Finding:
    release = f"{platform.system()} {platform.release()}"
    missing = [name for name in ("pidfd_open", "memfd_create") if not hasattr(os, name)]
    if sys.platform != "linux" or missing or not Path("/proc/self/stat").exists():
        return problem(
            "kernel",
            release,
            "run it on Linux 5.3 or newer, with /proc mounted; containers will do",
        )
    return well("kernel", release)


def _python() -> Finding:
    seen = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON_WANTED:
        return problem("python", seen, "install Python 3.11 or newer, and Muster there")
    return well("python", seen)


def _packages() -> Finding:
    wanted = [line for line in requires("muster-train") or [] if "extra ==" not in line]
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in wanted]
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        return problem("packages", f"without {', '.join(missing)}", "make clean, then make up")
    return well("packages", f"muster-train {version('muster-train')} with {len(names)} others")


def _is_installed(name: str) -> bool:
    with suppress(PackageNotFoundError):
        version(name)
        return True
    return False


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_counted(soft)} open files, {_counted(hard)} if asked for"
    if soft != UNLIMITED and soft < DESCRIPTORS_LEAST:
        return problem("descriptors", seen, f"ulimit -n {DESCRIPTORS_WANTED}")
    if hard != UNLIMITED and hard < DESCRIPTORS_WANTED:
        fix = f"for jobs of many ranks raise the hard limit to {DESCRIPTORS_WANTED} (nofile)"
        return warning("descriptors", seen, fix)
    return well("descriptors", seen)


def _processes(slots: int) -> Finding:
    limit = min((limit for limit in _task_limits()), default=UNLIMITED)
    seen = f"{_counted(limit)} processes and threads for {slots} rank{'s' * (slots != 1)}"
    if limit in (UNLIMITED, -1) or limit >= slots * TASKS_OF_A_RANK:
        return well("processes", seen)
    fix = f"raise ulimit -u or pids.max to {slots * TASKS_OF_A_RANK}, or lower MUSTER_SLOTS"
    return warning("processes", seen, fix)


def _task_limits() -> Iterator[int]:
    """Yield the limits that there are: of the user, and of the control group."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != UNLIMITED and os.geteuid() != 0:  # it does not hold for root
        yield soft
    cell = cell_of("")
    if cell is not None:
        with suppress(OSError, ValueError):  # "max" is no number, and no limit
            yield int((cell.parent / "pids.max").read_text())


def _memory() -> Finding:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = int(found[1]) * 1024 if found else 0
    seen = f"{free >> 20} MiB available"
    if free < MEMORY_WANTED_BYTES:
        return warning("memory", seen, "a rank takes 50 MiB and its model: run fewer at once")
    return well("memory", seen)


def _shared_memory() -> Finding:
    try:
        size = shutil.disk_usage(SHARED_MEMORY).total
    except OSError as error:
        fix = "mount a tmpfs there: torch wants one"
        return warning(SHARED_MEMORY, f"not there ({error.strerror})", fix)
    seen = f"{size >> 20} MiB"
    if size < SHARED_MEMORY_WANTED_BYTES:
        return warning(SHARED_MEMORY, seen, "in a container, start it with --shm-size=1g")
    return well(SHARED_MEMORY, seen)


def _cells() -> Finding:
    cell = cell_of("")
    if cell is not None and os.access(cell.parent, os.W_OK):
        return well("cgroups", "each rank gets a control group of its own")
    return warning(
        "cgroups",
        "none to be had: what a rank leaves running is found by its brand alone",
        "for the kernel's help run Muster under systemd (systemd-run --user --scope "
        "-p Delegate=yes), or as root with cgroup v2",
    )


def _torch() -> Finding:
    gpus = visible_gpus(os.environ)
    cards = f"{gpus} GPU{'s' * (gpus != 1)}"
    if not _is_installed("torch"):
        return well("torch", f"not installed, and not needed; {cards}")
    return well("torch", f"{version('torch')}; {cards}")


def _counted(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)
