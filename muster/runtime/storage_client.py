"""A rank's connection to the storage process, which alone talks to an object store.

The process may die at any moment: a request without a reply is sent again to the next one.
"""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from muster.checkpoints import errors as checkpoint_errors
from muster.checkpoints.errors import CheckpointError, CheckpointFailed, UnsupportedState
from muster.checkpoints.format import State, pack, unpack
from muster.checkpoints.listing import gang_checkpoints
from muster.checkpoints.manager import CheckpointManager, open_manager
from muster.checkpoints.manifest import CheckpointName, decode_manifest
from muster.checkpoints.reader import Checkpoint
from muster.contracts.errors import MusterError, WireError
from muster.contracts.job.field_types import ResumeFrom
from muster.contracts.location import S3Location, parse_location
from muster.contracts.messages import storage
from muster.contracts.messages.agent import RankCheckpoints
from muster.contracts.messages.storage import OpenCheckpoints, StorageRequest
from muster.contracts.messages.wire import decode_storage_reply, encode
from muster.contracts.settings.environ import RankSettings
from muster.contracts.shards import Position, Reading, Shard
from muster.datasets import errors as dataset_errors
from muster.datasets.index import Totals
from muster.datasets.source import DatasetFacts, DataSource, Listing
from muster.datasets.sources import open_source
from muster.host.peers import connect_to_own
from muster.objects import errors as store_errors
from muster.runtime.stderr_messages import print_stderr

REACH_SECONDS: Final = 30.0
"""How long a rank waits for a storage process: its agent starts one a second after another."""

NOTICE_SECONDS: Final = 10.0
"""A rank that waits longer for its last save says so."""

RETRY_SECONDS: Final = 0.05
DEATHS_LIMIT: Final = 5
"""After so many deaths during one request the request is taken for their cause."""


class StorageConnection:
    """One request at a time to the process that listens at an address."""

    def __init__(
        self, address: Path, session: OpenCheckpoints | None, warn: Callable[[str], None]
    ) -> None:
        """`session` is for requests about checkpoints."""
        self._address: Final = address
        self._session: Final = session
        self._warn: Final = warn
        self._channel: socket.socket | None = None
        self._request: tuple[bytes, Sequence[int]] = b"", ()

    def send(self, request: StorageRequest, *descriptors: int) -> None:
        """Send a request; `reply` does it if there is no process at the moment."""
        self._request = encode(request), descriptors
        with suppress(OSError):
            self._send()

    def reply(self) -> tuple[bytearray, bytes]:
        """Wait for the reply to the last request; return its arrays and its JSON.

        Raises the error that the process has met, and `CheckpointFailed` if it cannot be reached.
        """
        deaths, deadline = 0, time.monotonic() + REACH_SECONDS
        while deaths < DEATHS_LIMIT and time.monotonic() < deadline:
            with suppress(OSError, WireError):
                if self._channel is None:
                    self._send()
                return self._receive()
            if self._channel is not None:  # it has died
                deaths, deadline = deaths + 1, time.monotonic() + REACH_SECONDS
                self.close()
            time.sleep(RETRY_SECONDS)
        raise CheckpointFailed(
            f"the storage process at {self._address} does not answer: see storage.log"
        )

    def ask(self, request: StorageRequest) -> tuple[bytearray, bytes]:
        """Send a request and return its reply."""
        self.send(request)
        return self.reply()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _send(self) -> None:
        try:
            if self._channel is None:
                self._channel = connect_to_own(self._address, None)
                if self._session is not None:
                    self._channel.send(encode(self._session))
            content, descriptors = self._request
            socket.send_fds(self._channel, [content], descriptors)
        except OSError:
            self.close()
            raise

    def _receive(self) -> tuple[bytearray, bytes]:
        assert self._channel is not None  # noqa: S101  `reply` has connected it
        while True:
            content, descriptors, _, _ = socket.recv_fds(
                self._channel, storage.PACKET_LIMIT_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
            if not content:
                raise ConnectionResetError
            reply = decode_storage_reply(content)
            if isinstance(reply, storage.StorageWarned):
                self._warn(reply.message)
            elif isinstance(reply, storage.StorageFailed):
                raise error_of(reply)
            else:
                arrays = bytearray(reply.state_bytes)
                if not descriptors:
                    return arrays, b""
                with os.fdopen(descriptors[0], "rb") as file:
                    file.seek(0)  # the offset is shared with its writer
                    file.readinto(arrays)
                    return arrays, file.read(reply.json_bytes)


class SharedMemory:
    """Anonymous memory whose pages are kept: their first use costs more than copying into them."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._map: mmap.mmap | None = None

    def fill(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write the parts one after the other; nothing may read the memory meanwhile."""
        size = sum(map(len, parts))
        if self._map is None or len(self._map) < size:
            self.close()
            self.descriptor = os.memfd_create("muster-checkpoint", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, 2 * size)  # what is not used is no memory
            self._map = mmap.mmap(self.descriptor, 0)
        end = 0
        for part in parts:
            start, end = end, end + len(part)
            memoryview(self._map)[start:end] = part

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            os.close(self.descriptor)
            self._map = None


class RemoteCheckpoints:
    """A `CheckpointManager` whose saves become durable in the storage process, a little later.

    `save` copies the state and hands it over. The process finishes the save even if this one dies;
    if it dies itself, the save is sent again. The next save waits for it. A failure that may pass
    is a warning; any other is raised by the next call.
    """

    def __init__(self, connection: StorageConnection, warn: Callable[[str], None]) -> None:
        self._connection: Final = connection
        self._warn: Final = warn
        self._memory: Final = SharedMemory()
        self._delivery: threading.Thread | None = None
        self._save: tuple[storage.Save, Callable[[int], None]] | None = None
        """The last one, which the memory holds, and what to call once it is durable."""
        self._error: CheckpointError | None = None  # that of the last save

    def claim(self) -> None:
        self._ask(storage.Claim())

    def best(self) -> float | None:
        return msgspec.json.decode(self._ask(storage.FindBest())[1], type=float | None)

    def restore(self) -> Checkpoint | None:
        arrays, content = self._ask(storage.Restore())
        if not content:
            return None
        manifest = decode_manifest(content, "the manifest")
        name = CheckpointName(manifest.generation, manifest.step)
        state = unpack(arrays if manifest.files else None, manifest.state_values, str(name))
        return Checkpoint(name=name, manifest=manifest, state=state)

    def save(
        self, step: int, position: Position, state: State, on_saved: Callable[[int], None]
    ) -> None:
        """Copy the state, and call `on_saved` from another thread as `CheckpointManager` does."""
        self._settle()
        packed = pack(state)
        try:
            values = msgspec.json.encode(packed.values)
        except (ValueError, RecursionError) as error:
            raise UnsupportedState(f"the state cannot be written as JSON: {error}") from error
        self._memory.fill([*packed.buffers, values])
        sizes = {"state_bytes": packed.size_bytes, "json_bytes": len(values)}
        self._save = storage.Save(step=step, position=position, **sizes), on_saved
        self._start()

    def put_witness(self, witness: bytes) -> None:
        """Write a JSON value beside the last checkpoint once that is durable, if it ever is."""
        arguments = self._delivery, witness
        self._delivery = threading.Thread(target=self._deliver_witness, args=arguments, daemon=True)
        self._delivery.start()

    def _deliver_witness(self, save: threading.Thread | None, witness: bytes) -> None:
        if save is not None:
            save.join()
        if self._error is None:
            self._memory.fill([witness])  # the save needs it no more
            with suppress(CheckpointError):
                request = storage.Witness(json_bytes=len(witness))
                self._connection.send(request, self._memory.descriptor)
                self._connection.reply()

    def witness(self) -> bytes:
        return self._ask(storage.ReadWitness())[1]

    def flush(self) -> None:
        """Wait until the last save is durable; raise what has made it fail twice."""
        self._settle()
        if self._error is not None:
            self._start()  # what has made it fail may have passed
            self._settle()
        self._raise_error()

    def close(self) -> None:
        """Wait for the last save, durable or not."""
        with suppress(CheckpointError):
            self._settle()
        self._connection.close()
        self._memory.close()

    def _ask(self, request: StorageRequest) -> tuple[bytearray, bytes]:
        self._settle()
        return self._connection.ask(request)

    def _start(self) -> None:
        assert self._save is not None  # noqa: S101
        self._error = None
        self._connection.send(self._save[0], self._memory.descriptor)
        self._delivery = threading.Thread(
            target=self._deliver, args=self._save, name="muster-save", daemon=True
        )
        self._delivery.start()

    def _deliver(self, save: storage.Save, on_saved: Callable[[int], None]) -> None:
        # Whatever error ends this thread: what was not acknowledged is not durable.
        self._error = CheckpointFailed("the last save was not acknowledged")
        try:
            self._connection.reply()
        except CheckpointError as error:
            self._error = error
            if isinstance(error, CheckpointFailed):
                self._warn(f"could not save a checkpoint, the next save tries again: {error}")
        else:
            self._error = None
            on_saved(save.state_bytes)

    def _settle(self) -> None:
        """Wait for the last save; raise an error that a repetition would meet again."""
        if self._delivery is not None:
            self._delivery.join(NOTICE_SECONDS)
            if self._delivery.is_alive():
                self._warn("training waits: the last state is not saved yet")
                self._delivery.join()
            self._delivery = None
        if not isinstance(self._error, CheckpointFailed):
            self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class RemoteSource:
    """A `DataSource` whose shards the storage process fetches into the cache of the host."""

    def __init__(self, location: S3Location, connection: StorageConnection) -> None:
        self.location: Final = location
        self._text: Final = str(location)
        self._connection: Final = connection
        self._lock: Final = threading.Lock()
        listing = self._ask(storage.ListShards(location=self._text), Listing)
        self._digest: Final[str] = listing.digest
        self.shards: Final[Sequence[Shard]] = listing.shards
        self.facts: Final[DatasetFacts | None] = listing.facts

    def path(self, shard_idx: int, reading: Reading | None = None) -> Path:
        request = storage.FetchShard(
            location=self._text, digest=self._digest, shard_idx=shard_idx, reading=reading
        )
        return Path(self._ask(request, str))

    def totals(self, shard_idxs: range) -> list[Totals]:
        idxs = (shard_idxs.start, shard_idxs.stop, shard_idxs.step)
        request = storage.CountShards(location=self._text, digest=self._digest, shard_idxs=idxs)
        found: list[Totals] = self._ask(request, list[Totals])
        return found

    def _ask(self, request: StorageRequest, kind: Any) -> Any:  # noqa: ANN401  a type, its value
        with self._lock:
            _, content = self._connection.ask(request)
        return msgspec.json.decode(content, type=kind)


Checkpoints: TypeAlias = CheckpointManager | RemoteCheckpoints


def session_of(settings: RankSettings, place_of: Callable[[str], str]) -> OpenCheckpoints:
    """Return what a rank says of its checkpoints; `place_of` returns the place of a job's."""
    earlier = ResumeFrom.parse(settings.resume_from or "")
    return OpenCheckpoints(
        location=place_of(settings.job_id),
        inherited=place_of(earlier.job) if earlier.job else None,
        inherited_step=earlier.step,
        job_id=settings.job_id,
        job_uid=settings.job_uid,
        rank=settings.rank,
        world_size=settings.world_size,
        generation=settings.generation,
        keep_last=settings.keep_last,
        restore_from=settings.restore_from,
    )


def open_checkpoints(
    settings: RankSettings, session: OpenCheckpoints, warn: Callable[[str], None]
) -> Checkpoints:
    """Return the checkpoints of a rank: by the storage process, unless they are on this host."""
    address = settings.storage_socket
    is_on_disk = isinstance(parse_location(session.location), Path)
    if address is None or (is_on_disk and not settings.sends_checkpoints):
        return open_manager(session, warn)
    return RemoteCheckpoints(StorageConnection(address, session, warn), warn)


def list_gang(
    address: Path | None, location: str, ranks: int, job_uid: str, *, is_inherited: bool
) -> list[RankCheckpoints]:
    """Return what each rank of a gang has saved, see `gang_checkpoints`.

    `address` is that of the storage process, if it has to be asked. Raises a `CheckpointError`.
    """
    if address is None:
        place = parse_location(location)
        return gang_checkpoints(place, ranks, job_uid, is_inherited=is_inherited)
    connection = StorageConnection(address, None, print_stderr)
    try:
        request = storage.ListGang(
            location=location, ranks=ranks, job_uid=job_uid, is_inherited=is_inherited
        )
        return msgspec.json.decode(connection.ask(request)[1], type=list[RankCheckpoints])
    finally:
        connection.close()


def open_data(settings: RankSettings, warn: Callable[[str], None]) -> DataSource:
    """Return the data set of a rank; one in an object store by the storage process, if there is."""
    location, address = settings.dataset_dir, settings.storage_socket
    if address is None or not isinstance(location, S3Location):
        return open_source(location)
    return RemoteSource(location, StorageConnection(address, None, warn))


def error_of(failed: storage.StorageFailed) -> MusterError:
    """Return the error that another process has met, with its class and sentence."""
    for module in (checkpoint_errors, dataset_errors, store_errors):
        kind = getattr(module, failed.error, None)
        if isinstance(kind, type) and issubclass(kind, MusterError):
            # Not by its constructor, which may make the sentence of other arguments.
            error: MusterError = kind.__new__(kind, failed.message)
            return error
    return CheckpointFailed(failed.message)
