"""A store of checkpoints on the coordinator's host, for a host that does not share its directory.

The storage process sends what is to be saved over a sealed link of its own. The other end
(`coordinator.agents.checkpoint_receiver`) writes it there, commits, and moves ``LATEST``. If the
link breaks, also because another coordinator takes over, the call is made again: a save may take
place twice, in two revisions. A successor that has claimed the place meanwhile refuses it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from muster.checkpoints.errors import CheckpointError, CheckpointFailed
from muster.checkpoints.format import Packed
from muster.checkpoints.manifest import (
    CheckpointName,
    Manifest,
    decode_manifest,
    parse_names,
    sign,
)
from muster.contracts.messages.agent import StoreHello
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.storage import (
    CHUNK_BYTES,
    StorageFailed,
    StorageWarned,
    StoreAnswer,
    StoreCall,
    StoreMethod,
)
from muster.contracts.messages.wire import decode_store_answer, encode
from muster.links.reconnect import LINK_ERRORS, Reconnect
from muster.runtime.storage_client import error_of
from worker.coordinator.link import AddressFile, ThreadLink

REACH_SECONDS: Final = 30.0
"""How long a call waits for a coordinator: a successor takes over within seconds."""

RETRY_SECONDS: Final = 0.2

BREAKS_LIMIT: Final = 8
"""After this many broken connections the call itself is assumed to be the cause."""


class StoreLink:
    """The connection of one thread of the storage process, made when it is needed."""

    def __init__(self, own: AgentAssignment) -> None:
        self._own: Final = own
        self.reconnect: Final = Reconnect(RETRY_SECONDS, REACH_SECONDS)
        self.channel: ThreadLink | None = None
        """What a store has claimed holds for this one."""

    def connect(self) -> None:
        """Connect unless that is done. Raises OSError, `WireError`, `AuthenticationFailed`."""
        if self.channel is not None:
            return
        file = AddressFile(self._own)
        self.channel = ThreadLink(self._own, StoreHello(), file.take(), file)
        try:
            decode_store_answer(self.channel.receive())  # it listens
        except BaseException:
            self.close()
            raise

    def exchange(
        self, call: StoreCall, warn: Callable[[str], None], *content: Iterable[memoryview]
    ) -> tuple[StoreAnswer, bytearray]:
        """Make a call on the connection; return the answer and its bytes.

        Raises the error that the other end has met, or that of the connection, which is closed.
        """
        assert self.channel is not None  # noqa: S101  it is connected
        found = bytearray()
        try:
            self.channel.send(encode(call))
            for buffer in chain(*content):
                for start in range(0, len(buffer), CHUNK_BYTES):
                    self.channel.send(buffer[start : start + CHUNK_BYTES])
            while isinstance(answer := decode_store_answer(self.channel.receive()), StorageWarned):
                warn(answer.message)
            while isinstance(answer, StoreAnswer) and len(found) < answer.size_bytes:
                found += self.channel.receive()
        except BaseException:  # in the middle of a call: nothing can follow
            self.close()
            raise
        if isinstance(answer, StorageFailed):
            raise error_of(answer)
        return answer, found

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class CoordinatorStore:
    """A `CheckpointStore` in a directory of the coordinator's host."""

    def __init__(self, link: StoreLink, location: Path, warn: Callable[[str], None]) -> None:
        """`warn` takes sentences for the user."""
        self.location: Final = location
        self._link: Final = link
        self._warn: Final = warn
        self._claim: StoreCall | None = None
        self._claimed_on: ThreadLink | None = None

    def latest(self) -> CheckpointName | None:
        return next(iter(self._names("latest")), None)

    def names(self) -> list[CheckpointName]:
        return self._names("names")

    def by_trust(self) -> Iterator[CheckpointName]:
        yield from self._names("by_trust")

    def ranks(self) -> list[int]:
        return list(self._call(self._to("ranks"))[0].numbers)

    def read(self, name: CheckpointName, file: str, limit_bytes: int) -> bytearray:
        call = self._to("read", name)
        return self._call(msgspec.structs.replace(call, file=file, limit_bytes=limit_bytes))[1]

    def claim(self, generation: int | None, job_uid: str | None) -> int:
        call = self._to("claim")
        call = msgspec.structs.replace(call, generation=generation, job_uid=job_uid)
        self._claim = None
        answer, _ = self._call(call)
        (claimed,) = answer.numbers
        self._claim = msgspec.structs.replace(call, generation=claimed)
        self._claimed_on = self._link.channel
        return claimed

    def commit(self, unsigned: Manifest, packed: Packed) -> tuple[CheckpointName, Manifest]:
        _, manifest = sign(unsigned)
        sizes = {"manifest_bytes": len(manifest), "state_bytes": packed.size_bytes}
        call = msgspec.structs.replace(self._to("commit"), **sizes)
        answer, content = self._call(call, [memoryview(manifest)], packed.buffers)
        (name,) = parse_names(answer.names)
        return name, decode_manifest(content, f"the manifest of {name}")

    def put_witness(self, name: CheckpointName, content: bytes) -> None:
        call = msgspec.structs.replace(self._to("put_witness", name), manifest_bytes=len(content))
        self._call(call, [memoryview(content)])

    def rewind(self, name: CheckpointName) -> None:
        self._call(self._to("rewind", name))

    def remove(self, name: CheckpointName) -> None:
        self._call(self._to("remove", name))

    def close(self) -> None:
        self._claim = None
        if self._link.channel is not None:  # otherwise the other end has closed the store
            with suppress(*LINK_ERRORS, CheckpointError):
                self._link.exchange(self._to("close"), self._warn)

    def _to(self, method: StoreMethod, name: CheckpointName | None = None) -> StoreCall:
        of = "" if name is None else str(name)
        return StoreCall(location=str(self.location), method=method, name=of)

    def _names(self, method: StoreMethod) -> list[CheckpointName]:
        return parse_names(self._call(self._to(method))[0].names)

    def _call(
        self, call: StoreCall, *content: Iterable[memoryview]
    ) -> tuple[StoreAnswer, bytearray]:
        """Make a call, on a new connection after claiming again if one breaks."""
        breaks, attempts = 0, self._link.reconnect
        for _ in attempts:
            was_connected = False
            try:
                self._link.connect()
                was_connected = True
                if self._claim is not None and self._claimed_on is not self._link.channel:
                    self._link.exchange(self._claim, self._warn)
                    self._claimed_on = self._link.channel
                return self._link.exchange(call, self._warn, *content)
            except LINK_ERRORS as error:
                attempts.failed(error)
                if was_connected:  # however long a large state has taken until then
                    breaks += 1
                    attempts.restart()
                if breaks >= BREAKS_LIMIT:
                    break
        raise CheckpointFailed(
            f"the coordinator, which keeps {self.location}, cannot be reached: {attempts.error}"
        ) from attempts.error
