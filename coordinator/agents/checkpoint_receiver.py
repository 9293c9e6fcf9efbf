"""Stores checkpoints for hosts that do not share the directory of checkpoints.

It does what the storage process there asks for (`worker.coordinator.store`), in the directories of
its own job alone. Each connection has a thread: a slow disk delays no job.
"""

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog

from muster.checkpoints.errors import CheckpointFailed, CheckpointNotWritable
from muster.checkpoints.format import Packed
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manifest import (
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    STATE,
    WITNESS,
    CheckpointName,
    decode_manifest,
    parse_names,
    sign,
)
from muster.checkpoints.store import CheckpointStore
from muster.contracts.errors import AuthenticationFailed, MusterError, WireError
from muster.contracts.messages.storage import (
    CHUNK_BYTES,
    SENTENCE_LIMIT,
    StorageFailed,
    StorageWarned,
    StoreAnswer,
    StoreCall,
    StoreMethod,
)
from muster.contracts.messages.wire import decode_store_call, encode
from muster.contracts.settings.paths import rank_of_checkpoints
from muster.links.blocking import BlockingLink

LISTS: Final[Mapping[StoreMethod, Callable[[CheckpointStore], StoreAnswer]]] = {
    "latest": lambda store: _names([name] if (name := store.latest()) else []),
    "names": lambda store: _names(store.names()),
    "by_trust": lambda store: _names(store.by_trust()),
    "ranks": lambda store: StoreAnswer(numbers=tuple(store.ranks())),
}

READS_AT_ONCE: Final = 2
"""Many ranks may restore at once, and the coordinator's memory is for other things."""

_READS: Final = threading.Semaphore(READS_AT_ONCE)
_SWAPPING: Final = threading.Lock()

_LOG: Final = structlog.get_logger("coordinator")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDirectories:
    """Where a job saves, and where the job has saved from which it resumes."""

    own: Path
    inherited: Path | None

    def may(self, call: StoreCall) -> bool:
        """Return whether the job may make a call."""
        place = Path(call.location)
        job = place if rank_of_checkpoints(place.name) is None else place.parent
        is_there = job == self.own or (job == self.inherited and call.method in {*LISTS, "read"})
        return is_there and call.file in {"", MANIFEST, STATE, WITNESS}


class CheckpointReceiver(threading.Thread):
    """Serves one connection."""

    def __init__(
        self,
        link: BlockingLink,
        directories: JobDirectories,
        host: str,
        claims: dict[str, "CheckpointReceiver"],
    ) -> None:
        """`claims` are shared: by place, the receiver that has claimed it last."""
        super().__init__(daemon=True, name=f"checkpoints of {host}")
        self._claims: Final = claims
        self._is_ended = False
        self._link: Final = link
        self._directories: Final = directories
        self._host: Final = host
        self._stores: dict[str, CheckpointStore] = {}

    def run(self) -> None:
        try:
            self._link.send(encode(StoreAnswer()))
            while True:
                call = decode_store_call(self._link.receive())
                if self._is_ended:
                    break  # what was sent before is in the buffers still
                # A file that is read is in memory until it is sent.
                with _READS if call.method == "read" else nullcontext():
                    self._answer(call)
        except ConnectionResetError:
            pass  # the process has ended
        except (OSError, WireError, AuthenticationFailed) as error:
            words = f"checkpoints of {self._host} do not come: {error}"
            _LOG.warning(words, action="checkpoints_missing")
        finally:
            self._link.close()
            for location in [*self._stores]:
                self._close(location)

    def end(self) -> None:
        """End the connection; the other end connects to the next coordinator."""
        self._is_ended = True
        self._link.shut_down()

    def _answer(self, call: StoreCall) -> None:
        chunks = self._chunks(call.manifest_bytes + call.state_bytes)
        content: bytes | bytearray = b""
        answer: StoreAnswer | StorageFailed
        try:
            answer, content = self._carry_out(call, chunks)
        except (WireError, AuthenticationFailed, ConnectionResetError):
            raise
        except MusterError as error:
            answer = StorageFailed(error=type(error).__name__, message=str(error)[:SENTENCE_LIMIT])
        except Exception as error:  # noqa: BLE001  the rank there decides what follows
            _LOG.exception("cannot keep a checkpoint", action="checkpoint_failed", host=self._host)
            message = f"the coordinator failed: {error!r}"[:SENTENCE_LIMIT]
            answer = StorageFailed(error=CheckpointFailed.__name__, message=message)
        for _ in chunks:  # of a commit that has failed
            pass
        self._link.send(encode(answer))
        for start in range(0, len(content), CHUNK_BYTES):
            self._link.send(memoryview(content)[start : start + CHUNK_BYTES])

    def _carry_out(
        self, call: StoreCall, chunks: Iterator[memoryview]
    ) -> tuple[StoreAnswer, bytes | bytearray]:
        """Return the answer, and the bytes behind it. Raises a `CheckpointError`."""
        if not self._directories.may(call):
            raise CheckpointNotWritable(f"the job may not {call.method} in {call.location}")
        # In memory. Only the state of a commit goes to the disk as it comes.
        kept_bytes = call.manifest_bytes + call.state_bytes * (call.method != "commit")
        if kept_bytes > MANIFEST_LIMIT_BYTES:
            raise WireError(f"{kept_bytes} bytes of a {call.method} are too many")
        if call.method == "close":
            self._close(call.location)
            return StoreAnswer(), b""
        store = self._stores.get(call.location)
        if store is None:
            writer = secrets.token_hex(8)
            store = LocalStore(Path(call.location), self._warn, writer=writer)
            self._stores[call.location] = store
        if call.method in LISTS:
            return LISTS[call.method](store), b""
        if call.method == "claim":
            self._take_over(call.location)
            return StoreAnswer(numbers=(store.claim(call.generation, call.job_uid),)), b""
        if call.method == "commit":
            return self._commit(store, call, chunks)
        (name,) = parse_names([call.name])
        if call.method == "read":
            content = store.read(name, call.file, call.limit_bytes)
            return StoreAnswer(size_bytes=len(content)), content
        if call.method == "put_witness":
            store.put_witness(name, b"".join(chunks))
            return StoreAnswer(), b""
        store.rewind(name) if call.method == "rewind" else store.remove(name)
        return StoreAnswer(), b""

    def _close(self, location: str) -> None:
        if store := self._stores.pop(location, None):
            store.close()
        with _SWAPPING:
            if self._claims.get(location) is self:
                del self._claims[location]

    def _take_over(self, location: str) -> None:
        """Let no earlier connection go on in a place; a commit there may be under way."""
        with _SWAPPING:
            if self._is_ended:  # or two of them would wait for each other
                raise ConnectionResetError("a later connection has claimed this place")
            earlier = self._claims.get(location, self)
            self._claims[location] = self
            if earlier is not self:
                earlier.end()
        if earlier is not self:
            earlier.join()  # no commit may pass its check of fences after the claim

    def _commit(
        self, store: CheckpointStore, call: StoreCall, chunks: Iterator[memoryview]
    ) -> tuple[StoreAnswer, bytes]:
        manifest = bytearray()
        while len(manifest) < call.manifest_bytes:
            manifest += next(chunks)
        unsigned = decode_manifest(manifest, "what a storage process sent")
        # The state goes to the disk while the rest of it comes.
        packed = Packed(chunks, call.state_bytes, unsigned.values)
        unsigned = msgspec.structs.replace(unsigned, manifest_xxh3="")
        name, signed = store.commit(unsigned, packed)
        _, content = sign(msgspec.structs.replace(signed, manifest_xxh3=""))
        return StoreAnswer(names=(str(name),), size_bytes=len(content)), content

    def _chunks(self, size_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes that follow a call."""
        while size_bytes > 0:
            chunk = self._link.receive()
            size_bytes -= len(chunk)
            yield memoryview(chunk)

    def _warn(self, sentence: str) -> None:
        with suppress(OSError):  # the process has ended
            self._link.send(encode(StorageWarned(message=sentence[:SENTENCE_LIMIT])))


def _names(names: Iterable[CheckpointName]) -> StoreAnswer:
    return StoreAnswer(names=tuple(map(str, names)))
