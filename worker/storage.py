"""The storage process: ``python -P -m muster worker.storage``, one per job and host.

It is the only process of a job that talks to the object store and has its keys, or that sends
checkpoints and logs to the coordinator's host. Each connection has a thread, and so have the logs.
A request that was sent is carried out even if its rank dies. A second process waits until the first
has ended: on SIGTERM, or when its agent and all ranks are gone. On another host it ends with its
agent, for which alone the coordinator takes what it sends; a rank then sends its request again to
the next process.
"""

import fcntl
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from muster.checkpoints.errors import CheckpointFailed
from muster.checkpoints.format import Packed, pack
from muster.checkpoints.listing import gang_checkpoints
from muster.checkpoints.manager import CheckpointManager, open_manager
from muster.checkpoints.manifest import sign
from muster.checkpoints.store import CheckpointStore, open_store
from muster.contracts.errors import MusterError, WireError
from muster.contracts.location import Location, S3Location, parse_location
from muster.contracts.messages import storage
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.storage import (
    SENTENCE_LIMIT,
    DataRequest,
    Done,
    OpenCheckpoints,
    StorageFailed,
    StorageReply,
    StorageRequest,
)
from muster.contracts.messages.wire import decode_storage_request, encode
from muster.datasets.errors import ShardChanged
from muster.datasets.index import Totals
from muster.datasets.source import Listing
from muster.datasets.sources import open_s3_source
from muster.datasets.sources.s3 import S3Source
from muster.host.peers import peer_of, short_socket_path
from muster.runtime.redaction import Redaction
from muster.runtime.stderr_messages import print_stderr
from worker.coordinator.log_sender import send_logs
from worker.coordinator.store import CoordinatorStore, StoreLink
from worker.helpers import SENDER_GRACE_SECONDS

BACKLOG: Final = 4096  # all ranks of a job may connect at once
CHECK_SECONDS: Final = 0.5
PROGRESS_SECONDS: Final = 10.0
LINGER_SECONDS: Final = 5.0
"""How long it stays without its agent and without a connection: a rank may be between two."""


class _Terminated(BaseException):
    """SIGTERM has arrived."""


class Server:
    """The listening socket, and its connections."""

    def __init__(self, assignment: storage.StorageAssignment, agent_gone: threading.Event) -> None:
        self.redaction: Final = Redaction(assignment.keys.values())
        self.locks: Final[defaultdict[str, threading.Lock]] = defaultdict(threading.Lock)
        """One for each place of checkpoints."""
        agent = assignment.agent
        self.sending: Final = agent if agent is not None and agent.sends_checkpoints else None
        self._agent_gone = agent_gone
        self._grace_seconds = assignment.stop_grace_seconds
        self._connections: list[Connection] = []
        self._sources: dict[str, S3Source] = {}
        self._opening = threading.Lock()
        self._path = Path(assignment.socket)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(CHECK_SECONDS)
        self._path.unlink(missing_ok=True)
        with short_socket_path(self._path) as address:
            self._listener.bind(address)
        self._listener.listen(BACKLOG)

    def source(self, location: str) -> S3Source:
        """Return the one source of a location, whose cache sees what all ranks read."""
        with self._opening:
            found = self._sources.get(location)
            if found is None:
                place = parse_location(location)
                assert isinstance(place, S3Location)  # noqa: S101  the only kind that ranks send
                found = self._sources[location] = open_s3_source(place)
            return found

    def run(self) -> None:
        """Serve until it is terminated or no longer needed; then finish what was sent by then."""
        needed_at = time.monotonic()
        with suppress(_Terminated):
            while time.monotonic() < needed_at + LINGER_SECONDS:
                self._connections = [each for each in self._connections if each.is_alive()]
                if self._connections or not self._agent_gone.is_set():
                    needed_at = time.monotonic()
                with suppress(TimeoutError):
                    channel, _ = self._listener.accept()
                    if peer_of(channel).user_id == os.geteuid():
                        connection = Connection(channel, self)
                        connection.start()
                        self._connections.append(connection)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        deadline = time.monotonic() + self._grace_seconds
        for connection in self._connections:
            connection.finish(max(0.0, deadline - time.monotonic()))
        for source in self._sources.values():
            source.close()


class Connection(threading.Thread):
    """Carries out the requests of one rank."""

    def __init__(self, channel: socket.socket, server: Server) -> None:
        super().__init__(daemon=True)
        channel.settimeout(None)
        self._channel: Final = channel
        self._server: Final = server
        self._session: OpenCheckpoints | None = None
        self._manager: CheckpointManager | None = None
        self._link: Final = None if server.sending is None else StoreLink(server.sending)

    def run(self) -> None:
        with self._channel, suppress(OSError, WireError):  # the rank is gone, or not ours
            while True:
                content, descriptors, _, _ = socket.recv_fds(
                    self._channel, storage.PACKET_LIMIT_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
                if not content:
                    break
                request = decode_storage_request(content)
                if isinstance(request, OpenCheckpoints):
                    self._session = request
                else:
                    self._answer(request, descriptors)
        if self._manager is not None:
            self._manager.close()
        if self._link is not None:
            self._link.close()

    def finish(self, seconds: float) -> None:
        """Wait until everything is carried out that was sent before."""
        with suppress(OSError):  # its thread has closed it
            self._channel.shutdown(socket.SHUT_RD)
        self.join(seconds)

    def _answer(self, request: StorageRequest, descriptors: list[int]) -> None:
        reply: StorageReply
        try:
            arrays, content = self._carry_out(request, descriptors)
            if content:
                descriptors.append(_memory_of([*arrays, content]))
            reply = Done(state_bytes=sum(map(len, arrays)), json_bytes=len(content))
        except MusterError as error:
            reply = StorageFailed(error=type(error).__name__, message=self._log(str(error)))
        except Exception as error:  # noqa: BLE001  the rank decides what follows
            self._log(traceback.format_exc())
            message = self._log(f"the storage process failed: {error!r}")
            reply = StorageFailed(error=CheckpointFailed.__name__, message=message)
        try:
            has_memory = isinstance(reply, Done) and reply.json_bytes
            socket.send_fds(self._channel, [encode(reply)], descriptors[-1:] if has_memory else [])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _carry_out(  # noqa: C901  one branch for each kind of request
        self, request: StorageRequest, descriptors: list[int]
    ) -> tuple[Sequence[memoryview], bytes]:
        """Return the arrays and the JSON of the reply."""
        if isinstance(request, storage.ListGang):
            listed = gang_checkpoints(
                parse_location(request.location),
                request.ranks,
                request.job_uid,
                is_inherited=request.is_inherited,
                guard=self._server.locks.__getitem__,
                open_at=self._open,
            )
            return [], msgspec.json.encode(listed)
        if isinstance(request, DataRequest):
            return [], msgspec.json.encode(self._read_data(request))
        if self._session is None:
            raise WireError("the first message of a connection names the checkpoints")
        # One after the other, also across connections: the successor of a rank claims after the
        # save that the rank has left behind.
        with self._server.locks[self._session.location]:
            if self._manager is None:
                self._manager = open_manager(
                    self._session, self._warn, self._open, reports_cost=False
                )
            if isinstance(request, storage.Claim):
                self._manager.claim()
            elif isinstance(request, storage.FindBest):
                return [], msgspec.json.encode(self._manager.best())
            elif isinstance(request, storage.ReadWitness):
                return [], self._manager.witness()
            elif isinstance(request, storage.Restore) and (found := self._manager.restore()):
                unsigned = msgspec.structs.replace(found.manifest, manifest_xxh3="")
                return [*pack(found.state).buffers], sign(unsigned)[1]
            elif isinstance(request, storage.Witness):
                self._manager.put_witness(os.pread(descriptors[0], request.json_bytes, 0))
            elif isinstance(request, storage.Save):
                content = memoryview(mmap.mmap(descriptors[0], 0, prot=mmap.PROT_READ))
                size, end = request.state_bytes, request.state_bytes + request.json_bytes
                values = msgspec.json.decode(content[size:end])
                packed = Packed([content[:size]] if size else [], size, values)
                self._manager.save(request.step, request.position, packed)
        return [], b""

    def _open(
        self, location: Location, warn: Callable[[str], None] = lambda _sentence: None
    ) -> CheckpointStore:
        if self._link is None or not isinstance(location, Path):
            return open_store(location, warn)
        return CoordinatorStore(self._link, location, warn)

    def _read_data(self, request: DataRequest) -> Listing | str | list[Totals]:
        source = self._server.source(request.location)
        listing = source.listing
        if isinstance(request, storage.ListShards):
            return listing
        if request.digest != listing.digest:
            raise ShardChanged(source.location, "has other shards than when this rank listed them")
        if isinstance(request, storage.FetchShard):
            return str(source.path(request.shard_idx, request.reading))
        next_report = time.monotonic() + PROGRESS_SECONDS

        def report(done: int, total: int) -> None:
            nonlocal next_report
            if time.monotonic() > next_report:
                next_report = time.monotonic() + PROGRESS_SECONDS
                self._warn(f"counted the lines of {done} of {total} shards of {request.location}")

        return source.totals(range(*request.shard_idxs), report)

    def _warn(self, sentence: str) -> None:
        with suppress(OSError):  # the rank is gone, its save goes on
            self._channel.send(encode(storage.StorageWarned(message=self._log(sentence))))

    def _log(self, text: str) -> str:
        """Print a text without keys, and return as much of it as a message holds."""
        redacted = self._server.redaction.redact_text(text)
        print_stderr(redacted)
        return redacted[:SENTENCE_LIMIT]


def _memory_of(parts: Sequence[bytes | memoryview]) -> int:
    memory = os.memfd_create("muster-storage", os.MFD_CLOEXEC)
    with os.fdopen(memory, "wb", closefd=False) as file:
        file.writelines(parts)
    return memory


def main() -> None:
    """Read the assignment from standard input, and serve it once no other process does."""
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=storage.StorageAssignment)
    os.environ.update(assignment.keys)  # unlike the first environment, not shown in /proc
    agent_gone, is_serving, is_ending = (threading.Event() for _ in range(3))

    def watch_agent() -> None:
        sys.stdin.buffer.read()
        agent_gone.set()
        if assignment.agent is not None or not is_serving.is_set():
            os._exit(1)

    def terminate(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        is_ending.set()
        raise _Terminated

    threading.Thread(target=watch_agent, daemon=True).start()
    logs = threading.Thread(target=_send_logs, args=[assignment.agent, is_ending], daemon=True)
    os.chdir("/")
    with suppress(_Terminated):
        signal.signal(signal.SIGTERM, terminate)
        logs.start()
        if assignment.socket:
            path = f"{assignment.socket}.lock"
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_serving.set()
            Server(assignment, agent_gone).run()
        else:
            is_ending.wait()  # a signal that interrupts `logs.join` would mark it as ended
    logs.join(SENDER_GRACE_SECONDS)
    os._exit(logs.is_alive())  # without waiting for threads that did not end within the grace


def _send_logs(own: AgentAssignment | None, is_ending: threading.Event) -> None:
    try:
        if own is not None:
            send_logs(own, is_ending)
    except Exception:  # noqa: BLE001  the agent starts another process
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
