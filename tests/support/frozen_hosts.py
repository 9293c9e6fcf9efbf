"""Hosts that freeze and resume: a coordinator, its agents and ranks, isolated from other hosts.

On one host, Muster ends every process that it replaces. A frozen host is out of its reach. Here a
host is a set of name spaces: a pid name space, so that other hosts neither signal its processes nor
take them for dead when their pids are missing, and a UTS name space, for its own name. Hosts share
only the files, the database and the network.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

from muster.contracts.environ import SPARE_RANK
from muster.host.containment import tag_of
from muster.host.processes import descendants
from tests.support.installation import DEADLINE_SECONDS, Installation, await_value

HERE = Path(__file__).parent
NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("--uts", "--mount", "--"),
)
SETTLE_SECONDS = 0.001
LOOK_SECONDS = 0.005

Mapping = tuple[str, str]
"""Permissions and the file's inode, of memory that is shared."""


@cache
def can_be_had() -> bool:
    """Whether this machine lets us make name spaces."""
    words = [*NAMESPACES, "true"]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


class Host:
    """One machine with a coordinator of an installation."""

    def __init__(self, installation: Installation, name: str, **environment: str) -> None:
        """With ``RESPAWN`` in its environment a coordinator that fails is started again."""
        self.name = name
        self.log = installation.root / f"{name}.log"
        command = [sys.executable, "-P", "-m", "coordinator"]
        with self.log.open("ab") as log:
            self._init = subprocess.Popen(
                [
                    *NAMESPACES,
                    sys.executable,
                    str(HERE / "host_init.py"),
                    name,
                    *command,
                ],
                cwd=installation.root,
                env={**installation.environment, **environment},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    # Its processes, by the pids that they have outside

    def processes(self) -> list[int]:
        """Return all that live, but the first one."""
        below = descendants(self._init.pid)
        return [pid for pid in below if is_there(pid) and not self._is_first(pid)]

    def marks(self) -> dict[int, str]:
        """Return what each is of which job; "" for a coordinator, nothing for its fork server."""
        tags = {pid: tag_of(pid) for pid in self.processes()}
        return {pid: tag or "" for pid, tag in tags.items() if tag != ""}

    def ranks(self) -> dict[int, str]:
        return {pid: mark for pid, mark in self.marks().items() if is_of_rank(mark)}

    def agents(self) -> dict[int, str]:
        """Return the agents, and what they keep ready."""
        return {pid: mark for pid, mark in self.marks().items() if mark and not is_of_rank(mark)}

    def coordinators(self) -> list[int]:
        return [pid for pid, mark in self.marks().items() if not mark]

    # What is done to it

    def freeze(self, first: Iterable[int] = ()) -> None:
        """Stop all processes, `first` before the others, and those started meanwhile."""
        signal_all(first, signal.SIGSTOP)
        while moving := [pid for pid in self.processes() if not stands_still(pid)]:
            signal_all(moving, signal.SIGSTOP)
            time.sleep(SETTLE_SECONDS)

    def is_waiting(self) -> bool:
        return "lease_awaited" in self.log.read_text()

    def coordinates(self) -> bool:
        return "lease_taken" in self.log.read_text()

    def exit_code(self) -> int | None:
        """Return that of the coordinator, once it has ended."""
        found = re.search(r"the service ended with (-?\d+)", self.log.read_text())
        return int(found[1]) if found else None

    def end(self) -> None:
        self._init.kill()  # and the kernel ends whatever is left in there
        self._init.wait(DEADLINE_SECONDS)
        if self._init.stdin is not None:
            self._init.stdin.close()

    def await_standby(self) -> None:
        await_value(
            lambda: self.is_waiting() or self.coordinates(), lambda: self.log.read_text()[-2000:]
        )

    def _is_first(self, pid: int) -> bool:
        return (HERE / "host_init.py").name in command_of(pid)


def is_of_rank(mark: str) -> bool:
    """Return False for an agent and what it keeps ready: its prefork server, spare processes."""
    _, *place = mark.split("/")
    return len(place) == 2 and place[0].isdigit() and int(place[0]) != SPARE_RANK


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def let_go(pids: Collection[int], in_time_seconds: float) -> dict[int, float]:
    """Let them go on; return after how many seconds each was gone, coarsely if not in time."""
    started = time.monotonic()
    signal_all(pids, signal.SIGCONT)
    gone: dict[int, float] = {}

    def look() -> bool:
        for pid in pids:
            if pid not in gone and not is_there(pid):
                gone[pid] = time.monotonic() - started
        return len(gone) == len(pids)

    until = started + in_time_seconds
    while not look() and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    await_value(look, lambda: f"{[command_of(pid) for pid in pids if pid not in gone]} stay")
    return gone


def stands_still(pid: int) -> bool:
    """Whether a process is stopped, or over."""
    return state_of(pid) in {"T", "Z", "X", ""}


def is_there(pid: int) -> bool:
    return state_of(pid) not in {"Z", "X", ""}


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def shared_memory(pid: int) -> Iterator[Mapping]:
    """Yield every shared mapping of an anonymous file."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if fields[1].endswith("s") and len(fields) > 5 and "memfd:" in fields[5]:
            yield fields[1], fields[4]
