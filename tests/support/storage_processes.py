"""A storage process of a test, and ranks that use it; places are directories."""

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from muster.contracts.location import Location
from muster.contracts.storage import Place, StorageAssignment
from muster.host.peers import peer_of
from muster.runtime.storage_client import RemoteCheckpoints, StorageConnection, socket_address
from muster.runtime.storage_process import StorageProcess
from tests.support.installation import await_value

KEY = "a key that stays with the process"


class StorageStage:
    """What an agent does for its ranks."""

    def __init__(
        self, root: Path, location: Location | None = None, keys: dict[str, str] | None = None
    ) -> None:
        """`location` is that of the checkpoints, a directory if there is none."""
        self.location = location or root / "checkpoints"
        self._keys = keys or {"S3_SECRET_KEY": KEY}
        self.socket = root / "storage.sock"
        self.log = root / "storage.log"
        self.warnings: list[str] = []
        self._ranks: list[RemoteCheckpoints] = []
        self._processes: list[StorageProcess] = []

    def start(self, environ: Mapping[str, str] = os.environ) -> StorageProcess:
        """Start a process as an agent does; a second one is its standby."""
        assignment = StorageAssignment(
            socket=str(self.socket), stop_grace_seconds=10.0, keys=self._keys
        )
        process = StorageProcess(assignment, environ, self.log)
        process.revive()
        self._processes.append(process)
        return process

    def revive(self) -> None:
        for process in self._processes:
            process.revive()

    def pid(self) -> int:
        """Return the process that listens now."""
        return listening_process(self.socket)

    def kill(self) -> int:
        """Kill what listens now, and return its former pid."""
        pid = self.pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    def rank(self, generation: int | None = 1, **fields: object) -> RemoteCheckpoints:
        rank = RemoteCheckpoints(
            StorageConnection(
                str(self.socket),
                place_of(self.location, generation, **fields),
                self.warnings.append,
                self.revive,
            ),
            self.warnings.append,
        )
        self._ranks.append(rank)
        return rank

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()
        for process in self._processes:
            process.stop()


@contextmanager
def connected(path: Path) -> Iterator[int]:
    """Be connected in the block, to the process whose pid it gets."""

    def is_connected() -> bool:
        with suppress(OSError), socket_address(str(path)) as address:
            channel.connect(address)
            return True
        return False

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        await_value(is_connected, lambda: f"nothing listens at {path}")
        yield peer_of(channel).pid


def listening_process(path: Path) -> int:
    with connected(path) as pid:
        return pid


def place_of(location: Location, generation: int | None = 1, **fields: object) -> Place:
    names = {
        "inherited": None,
        "job_id": "job",
        "job_uid": "uid",
        "rank": 0,
        "world_size": 1,
        "keep_last": 3,
        **fields,
    }
    return Place(location=str(location), generation=generation, **names)
