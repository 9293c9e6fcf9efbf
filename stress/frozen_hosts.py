"""Hosts that freeze and resume: a coordinator, its agents and ranks, isolated from other hosts.

On one host, Muster ends every process that it replaces. A frozen host is out of its reach. These
hosts (`hosts`) share the files, the database and the network.
"""

import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from muster.contracts.settings.names import SPARE_RANK
from muster.host.containment import tag_of
from muster.host.processes import identify
from tests.support.hosts import Host, signal_all
from tests.support.installation import Installation, await_value

LOOK_SECONDS = 0.005

Mapping = tuple[str, str]
"""Permissions and the file's inode, of memory that is shared."""


class CoordinatorHost(Host):
    """One machine with a coordinator of an installation."""

    def __init__(self, installation: Installation, name: str, **environment: str) -> None:
        super().__init__(name, installation.root)
        self._environment = {**installation.environment, **environment}
        self.start_coordinator()

    def start_coordinator(self) -> None:
        self.coordinator = self.start(
            [sys.executable, "-P", "-m", "coordinator"],
            self._environment,
            cwd=self.log.parent,
        )

    # Its processes, by the pids that they have outside

    def tagged(self) -> dict[int, str]:
        """Return what each is of which job; "" for a coordinator, nothing for its fork server."""
        tags = {pid: tag_of(pid) for pid in self.processes()}
        return {pid: tag or "" for pid, tag in tags.items() if tag != ""}

    def ranks(self) -> dict[int, str]:
        return {pid: tag for pid, tag in self.tagged().items() if is_of_rank(tag)}

    def agents(self) -> dict[int, str]:
        """Return the agents, and what they keep ready."""
        return {pid: tag for pid, tag in self.tagged().items() if tag and not is_of_rank(tag)}

    def coordinators(self) -> list[int]:
        return [pid for pid, tag in self.tagged().items() if not tag]

    # Its coordinator

    def is_waiting(self) -> bool:
        return "lease_awaited" in self.log.read_text()

    def coordinates(self) -> bool:
        return "lease_taken" in self.log.read_text()

    def await_standby(self) -> None:
        await_value(
            lambda: self.is_waiting() or self.coordinates(), lambda: self.log.read_text()[-2000:]
        )


def is_of_rank(tag: str) -> bool:
    """Return False for an agent and what it keeps ready: its prefork server, spare processes."""
    _, *place = tag.split("/")
    return len(place) == 2 and place[0].isdigit() and int(place[0]) != SPARE_RANK


def let_go(pids: Collection[int], in_time_seconds: float) -> dict[int, float]:
    """Let them go on; return after how many seconds each was gone, coarsely if not in time."""
    started = time.monotonic()
    signal_all(pids, signal.SIGCONT)
    gone: dict[int, float] = {}

    def look() -> bool:
        for pid in pids:
            if pid not in gone and identify(pid) is None:
                gone[pid] = time.monotonic() - started
        return len(gone) == len(pids)

    until = started + in_time_seconds
    while not look() and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
    await_value(look, lambda: f"{[command_of(pid) for pid in pids if pid not in gone]} stay")
    return gone


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
