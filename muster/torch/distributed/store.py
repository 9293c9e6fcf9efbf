"""How torch meets in a group that `muster.mesh` has discovered: ``init_method="muster://"``.

The members are connected already, and know their ranks. torch asks for a store as well: its data
is at rank 0, and requests go over the links of the mesh, which prove and seal what they carry. So
nothing listens for it.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partialmethod
from queue import Empty, SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import parse_qsl, urlsplit

import msgspec
import numpy as np
import torch.distributed as dist

import muster.mesh
from muster.collectives.backend import Backend
from muster.collectives.errors import ChannelClosed
from muster.collectives.operations import all_gather
from muster.collectives.subgroups import SubBackend
from muster.links.frames import CONTROL_FRAME_LIMIT_BYTES

if TYPE_CHECKING:
    from muster.mesh.group import MeshBackend

AGAIN_SECONDS: Final = 2.0
"""After which a request is sent once more: a note is lost with the link that it is on."""

CHECK_SECONDS: Final = 0.05
"""Between two looks at a key that is not there yet, or at who lives while a reply is awaited."""

REQUEST_LIMIT_BYTES: Final = CONTROL_FRAME_LIMIT_BYTES - 1024
"""So that it fits into a frame of a link, as does a reply with the value."""

Method: TypeAlias = Literal["add", "check", "compare_set", "delete_key", "get", "num_keys", "set"]
Request: TypeAlias = tuple[int, Method, list[Any]]
"""Its number, a method of torch's stores, and the arguments."""

Reply: TypeAlias = Sequence[Any]
"""The number of the request, a value, and an error or ""."""


def meet(
    url: str, timeout: timedelta = dist.default_pg_timeout, **_: object
) -> Iterator[tuple["MeshStore", int, int]]:
    """Yield store, rank and number of ranks, once all members of the group have called this.

    Raises `CollectiveError`, and ValueError without a group or if another one is expected.
    """
    backend = muster.mesh.last_discovered
    if backend is None:
        raise ValueError("muster:// needs a group: call muster.mesh.discover(peers=…) first")
    ours = {"rank": str(backend.rank), "world_size": str(backend.world_size)}
    if dict(parse_qsl(urlsplit(url).query)).items() - ours.items():
        raise ValueError(
            f"this is rank {backend.rank} of {backend.world_size} in the discovered group: give "
            "init_process_group no other rank and world_size"
        )
    own = np.frombuffer(secrets.token_bytes(16), np.uint8)
    store = MeshStore(backend, own.tobytes().hex())  # before the others can ask rank 0
    view = SubBackend(backend, range(backend.world_size))
    ids = all_gather(view, own, timeout_seconds=timeout.total_seconds())
    if backend.rank != 0:
        store = MeshStore(backend, ids[0].tobytes().hex())
    yield store, backend.rank, backend.world_size


def view_of(store: Any, ranks: Iterable[int]) -> Backend | None:  # noqa: ANN401  torch's
    """Return some ranks of the discovered group that `store` belongs to; None for another store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return SubBackend(store.backend, ranks) if isinstance(store, MeshStore) else None


class MeshStore(dist.Store):  # type: ignore[misc]  # torch does not declare it
    """The store of a discovered group. Its methods raise `DistStoreError` and `CollectiveError`."""

    def __init__(self, backend: "MeshBackend", topic: str) -> None:
        super().__init__()
        self.backend = backend
        assert backend.mesh is not None  # noqa: S101  a list of addresses was not discovered
        self._mesh = backend.mesh
        self._topic = topic
        self._asking = Lock()
        self._number = 0
        self._replies: SimpleQueue[Reply] = SimpleQueue()
        self._given: dict[str, tuple[int, bytes]] = {}
        """Of rank 0: the number of each member's last request, and the reply."""
        self._data = dist.HashStore()  # of rank 0
        self._data.set_timeout(timedelta(milliseconds=1))  # of its `get`: nothing waits there
        # This also keeps the object: torch holds only the part of it that is in C++.
        self._mesh.network.readers[topic] = self._read

    def get(self, key: str) -> bytes:
        self.wait([key])
        return bytes(self._ask("get", key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self._ask("check", keys):
            if time.monotonic() >= until:
                raise dist.DistStoreError(f"wait timeout: no rank has set {', '.join(keys)}")
            time.sleep(CHECK_SECONDS)

    def clone(self) -> "MeshStore":
        return self

    def _ask(self, method: str, *arguments: object) -> Any:  # noqa: ANN401  of the method
        """Return what rank 0 replies."""
        with self._asking:
            self._number += 1
            request = msgspec.msgpack.encode((self._number, method, arguments))
            size = len(request)
            if size > REQUEST_LIMIT_BYTES:
                raise dist.DistStoreError(f"{size} bytes are too long for a store: use a tensor")
            answer = self._perform if self.backend.rank == 0 else self._wait_for_reply
            _, value, error = answer(request)
        if error:
            raise dist.DistStoreError(f"{method} failed in the store: {error}")
        return value

    # By the names that C++ calls
    add = partialmethod(_ask, "add")
    check = partialmethod(_ask, "check")
    compare_set = partialmethod(_ask, "compare_set")
    set = partialmethod(_ask, "set")
    deleteKey = partialmethod(_ask, "delete_key")  # noqa: N815
    getNumKeys = partialmethod(_ask, "num_keys")  # noqa: N815

    def _wait_for_reply(self, request: bytes) -> Reply:
        mesh, members = self._mesh, self.backend.members
        send_at = time.monotonic()
        until = send_at + self.timeout.total_seconds()
        while (now := time.monotonic()) < until:
            if now >= send_at:
                mesh.network.send_note(members[0].process_id, self._topic, request)
                send_at += AGAIN_SECONDS
            with suppress(Empty):
                reply = self._replies.get(timeout=CHECK_SECONDS)
                if reply[0] == self._number:  # not to a call that a signal has ended
                    return reply
            mesh.check(members)
            if members[0].process_id not in {each.process_id for each in mesh.network.members()}:
                raise ChannelClosed(0)
        raise dist.DistStoreError("wait timeout: rank 0 does not answer; check the network")

    def _read(self, sender: str, payload: bytes) -> bytes | None:
        """Take a note, in the thread of the network."""
        number, *_ = said = msgspec.msgpack.decode(payload)
        if self.backend.rank != 0:
            self._replies.put(said)
            return None
        last, reply = self._given.get(sender, (0, b""))
        if number > last:  # not one that is sent again
            reply = msgspec.msgpack.encode(self._perform(payload))
            self._given[sender] = number, reply
        return reply if number >= last else None

    def _perform(self, request: bytes) -> Reply:
        number, method, arguments = msgspec.msgpack.decode(request, type=Request)
        try:
            return number, getattr(self._data, method)(*arguments), ""
        except (RuntimeError, ValueError, TypeError) as error:  # of the caller's arguments
            return number, None, str(error) or repr(error)
