"""Our collectives over a group that torch already has, such as one of gloo."""

import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, Queue, SimpleQueue
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist

from muster.collectives.backend import ELEMENT_BYTES, Target, fill
from muster.collectives.errors import BackendUnavailable, ChannelClosed, InvalidRank
from muster.collectives.transports.message_backend import MessageBackend
from muster.collectives.transports.streams import CHUNK_BYTES, Stream, beginning_of
from muster.torch.distributed.connect import host_identity

_TAG: Final = 0x6D757374
"""Tags of messages are larger, so that they never match those of the user in the same group."""

_FOREVER: Final = timedelta(days=365)
"""A peer may have nothing to say for longer than the group's timeout."""

_CHUNKS: Final = 4
"""Of up to 1 MiB, on the way to a peer or received and not read; more waits at the sender."""

_GOODBYE_SECONDS: Final = 2.0


class TorchBackend(MessageBackend):
    """A `Backend` by the messages of a torch group; all its ranks make one together.

    Its data is on the host. Close it before the group is destroyed.
    """

    _last_tag: ClassVar[int] = _TAG

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use `group`, or the default one.

        Raises `InvalidRank` unless this rank is a member, and `BackendUnavailable` if the group
        takes no tensors of the CPU.
        """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise InvalidRank(rank, world_size)
        config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
        self._devices = dict(pair.split(":") for pair in config.split(","))
        if "cpu" not in self._devices:
            raise BackendUnavailable(
                f"a group with {config} cannot send from the host: use "
                "init_process_group('cpu:gloo,cuda:nccl')"
            )
        own, known = host_identity() or f"rank {rank}", [("", 0)] * world_size
        dist.all_gather_object(known, (own, TorchBackend._last_tag), group=group)
        hosts = [host for host, _ in known]
        # Larger than that of any backend before: messages of two over one group must not match.
        tag = TorchBackend._last_tag = 1 + max(tag for _, tag in known)
        members = group or dist.group.WORLD
        peers = [peer for peer in range(world_size) if peer != rank]
        streams = {peer: _TorchStream(peer, members, tag) for peer in peers}
        super().__init__(rank, world_size, streams)
        self.hosts = tuple(hosts.index(host) for host in hosts)

    def supports(self, device: str | torch.device) -> bool:
        """Return whether torch has a way for tensors of `device` that avoids the host (NCCL)."""
        return self._devices.get(torch.device(device).type) == "nccl"


class _TorchStream(Stream):
    """The stream to one peer. Threads wait for torch, whose messages cannot be polled.

    gloo closes all connections when an awaited message does not come in time. So none is awaited
    by its size or time: one thread takes all that the peer sends, a size and then as many bytes.
    """

    alignment = ELEMENT_BYTES

    def __init__(self, peer: int, group: dist.ProcessGroup, tag: int) -> None:
        self.peer = peer
        self._tag = tag
        self._group = group
        self._outgoing: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._unsent: deque[torch.Tensor] = deque()
        self._incoming: Queue[memoryview] = Queue(_CHUNKS)
        self._chunk = memoryview(b"")
        self._is_over = False
        """True once the peer has closed or died; what it sent before may still be unread."""
        self._threads = [
            threading.Thread(target=loop, name=f"muster-torch-{peer}", daemon=True)
            for loop in (self._send_all, self._receive_all)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, parts: Iterable[memoryview]) -> int:
        if self._is_over:
            raise ChannelClosed(self.peer)
        data = bytearray().join(beginning_of(parts, CHUNK_BYTES))
        # Whole elements, as the reader's chunks begin where ours do. The rest comes with the next.
        size = len(data) - len(data) % ELEMENT_BYTES
        if not size or len(self._unsent) >= _CHUNKS:
            return 0
        # A tensor of the copy, which it keeps alive; what was sent from may change after `send`.
        chunk = torch.frombuffer(data, dtype=torch.uint8, count=size)
        self._unsent.append(chunk)
        self._outgoing.put(chunk)
        return size

    def receive(self, target: Target, offset: int, size_bytes: int) -> int:
        is_over = self._is_over  # first: the last chunk comes before it is set
        if not self._chunk.nbytes:
            try:
                self._chunk = self._incoming.get_nowait()
            except Empty:
                if is_over:
                    raise ChannelClosed(self.peer) from None
                return 0
        part = self._chunk[:size_bytes]
        fill(target, offset, part)
        self._chunk = self._chunk[size_bytes:]
        return part.nbytes

    def has_hung_up(self) -> bool:
        return self._is_over

    def close(self) -> None:
        self._outgoing.put(torch.empty(0, dtype=torch.uint8))  # ends the thread of the peer
        for thread in self._threads:
            # The second one ends when the peer closes; gloo may abort if it is destroyed before.
            thread.join(_GOODBYE_SECONDS)

    def _send_all(self) -> None:
        with suppress(RuntimeError):  # the peer is gone, which the other thread finds, too
            while True:
                chunk = self._outgoing.get()
                self._finish(self._group.send, torch.tensor([chunk.numel()]))
                if not chunk.numel():
                    return
                self._finish(self._group.send, chunk)
                self._unsent.popleft()

    def _receive_all(self) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        with suppress(RuntimeError):  # of gloo: the peer is gone
            while self._finish(self._group.recv, size).item():
                chunk = torch.empty(int(size.item()), dtype=torch.uint8)
                self._incoming.put(memoryview(self._finish(self._group.recv, chunk).numpy()))
        self._is_over = True

    def _finish(self, start: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  send, recv
        start([tensor], self.peer, self._tag).wait(_FOREVER)
        return tensor
