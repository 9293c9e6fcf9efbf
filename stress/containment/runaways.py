"""A rank that starts processes which try to survive: ``runaways.py KIND DIRECTORY [--outside]``.

Every process that it leaves behind writes its pid to DIRECTORY/pids and ignores SIGTERM. When all
have done so, DIRECTORY/ready exists; when DIRECTORY/go exists, the rank exits. ``--outside`` leaves
the control group first, as if control groups were not available.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

MANY: Final = 50


def wait_for_ever(note: Path) -> NoReturn:
    take_down(note)
    while True:
        signal.pause()


def take_down(note: Path) -> None:
    with note.open("a") as file:
        file.write(f"{os.getpid()}\n")


def child(note: Path) -> None:
    if os.fork() == 0:
        wait_for_ever(note)


def leader(note: Path) -> None:
    """Leave the session."""
    if os.fork() == 0:
        os.setsid()
        wait_for_ever(note)


def daemon(note: Path, become: Callable[[Path], NoReturn] = wait_for_ever) -> None:
    """Leave the session and the parent."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            become(note)
        os._exit(0)
    os.waitpid(middle, 0)


def stranger(note: Path) -> None:
    """Leave the session, the parent, the environment, every open file and the program."""

    def become(note: Path) -> NoReturn:
        take_down(note)
        os.closerange(0, 256)
        os.execve("/bin/sleep", ["sleep", "600"], {})  # noqa: S606  a plain program is the point

    daemon(note, become)


def comet(note: Path) -> None:
    """Fork a new process in a new session continuously, so that each one is short-lived."""

    def become(note: Path) -> NoReturn:
        take_down(note)
        while True:
            with suppress(BlockingIOError):
                if os.fork():
                    os._exit(0)
                os.setsid()

    daemon(note, become)


def many(note: Path) -> None:
    for number in range(MANY):
        (child, leader, daemon, stranger)[number % 4](note)


KINDS: Final[dict[str, Callable[[Path], None]]] = {
    kind.__name__: kind for kind in (child, leader, daemon, stranger, comet, many)
}


def leave_control_group() -> None:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line:
            with suppress(OSError):
                Path(line.split()[4], "cgroup.procs").write_text("0")


def main() -> int:
    kind, directory = sys.argv[1], Path(sys.argv[2])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--outside" in sys.argv:
        leave_control_group()
    note = directory / "pids"
    note.touch()
    KINDS[kind](note)
    while len(note.read_text().splitlines()) < (MANY if kind == "many" else 1):
        time.sleep(0.002)
    (directory / "ready").touch()
    while not (directory / "go").exists():
        time.sleep(0.002)
    return 3


if __name__ == "__main__":
    sys.exit(main())
