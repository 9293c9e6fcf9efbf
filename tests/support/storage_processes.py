"""A storage process of a test, and ranks that use it; places are directories."""

import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from muster.contracts.location import Location
from muster.contracts.messages.storage import OpenCheckpoints, StorageAssignment
from muster.host.peers import peer_of, short_socket_path
from muster.runtime.storage_client import RemoteCheckpoints, StorageConnection
from tests.support.installation import await_value
from worker.helpers import HelperProcess

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
        self._processes: list[HelperProcess] = []
        self._connections: list[StorageConnection] = []
        self._is_closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep_running, daemon=True)
        self._keeper.start()

    def start(self, environ: Mapping[str, str] = os.environ) -> HelperProcess:
        """Start a process as an agent does; a second one is its standby."""
        assignment = StorageAssignment(
            socket=str(self.socket), stop_grace_seconds=10.0, keys=self._keys
        )
        process = HelperProcess(
            "worker.storage", assignment, environ=environ, log=self.log, grace_seconds=10.0
        )
        process.ensure_running()
        self._processes.append(process)
        return process

    def _keep_running(self) -> None:
        while not self._is_closed.wait(0.05):
            for process in self._processes:
                process.ensure_running()

    def pid(self) -> int:
        """Return the process that listens now."""
        return listening_process(self.socket)

    def kill(self) -> int:
        """Kill what listens now, and return its former pid."""
        pid = self.pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    def rank(
        self, generation: int | None = 1, place: Location | None = None, **fields: object
    ) -> RemoteCheckpoints:
        session = session_of(place or self.location, generation, **fields)
        rank = RemoteCheckpoints(self.connection(session), self.warnings.append)
        self._ranks.append(rank)
        return rank

    def connection(self, session: OpenCheckpoints | None = None) -> StorageConnection:
        self._connections.append(StorageConnection(self.socket, session, self.warnings.append))
        return self._connections[-1]

    def close(self) -> None:
        self._is_closed.set()
        self._keeper.join()
        for opened in [*self._ranks, *self._connections]:
            opened.close()
        for process in self._processes:
            process.stop()


@contextmanager
def connected(path: Path) -> Iterator[int]:
    """Be connected in the block, to the process whose pid it gets."""

    def is_connected() -> bool:
        with suppress(OSError), short_socket_path(path) as address:
            channel.connect(address)
            return True
        return False

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        await_value(is_connected, lambda: f"nothing listens at {path}")
        yield peer_of(channel).pid


def listening_process(path: Path) -> int:
    with connected(path) as pid:
        return pid


def session_of(location: Location, generation: int | None = 1, **fields: object) -> OpenCheckpoints:
    names = {
        "inherited": None,
        "job_id": "job",
        "job_uid": "uid",
        "rank": 0,
        "world_size": 1,
        "keep_last": 3,
        **fields,
    }
    return OpenCheckpoints(location=str(location), generation=generation, **names)
