"""Our collectives over a group that torch already has, such as one of gloo."""

import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import torch
import torch.distributed as dist

from muster.collectives.backend import ELEMENT_BYTES, Target, fill
from muster.collectives.errors import BackendUnavailable, ChannelClosed, InvalidRank
from muster.collectives.message_backend import MessageBackend
from muster.torch.connect import host_identity

_TAG: Final = 0x6D757374
"""Of all messages, so that they never meet those of the user in the same group."""

_FOREVER: Final = timedelta(days=365)
"""A peer may have nothing to say for longer than the group's timeout."""

_GOODBYE_SECONDS: Final = 2.0

_ROOM_BYTES: Final = 4 << 20
"""On the way to a peer, or received and not read; more waits at the sender."""


class TorchBackend(MessageBackend):
    """A `Backend` by the messages of a torch group; all its ranks have to make it together.

    It belongs to the host: a tensor on a GPU is copied there unless `supports` its device, for
    which torch's own operations are faster. Close it before the group is destroyed.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Use `group`, or the default one.

        Raises `InvalidRank` unless this rank is a member, and `BackendUnavailable` if the group
        takes no tensors of the CPU.
        """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise InvalidRank(rank, world_size)
        self._devices = _backends_of(group)
        if "cpu" not in self._devices:
            raise BackendUnavailable(
                f"a group of {', '.join(self._devices.values())} cannot send from the host: use "
                "init_process_group('cpu:gloo,cuda:nccl')"
            )
        hosts: list[str] = [""] * world_size
        dist.all_gather_object(hosts, host_identity() or f"rank {rank}", group=group)
        peers = [peer for peer in range(world_size) if peer != rank]
        super().__init__(rank, world_size, {peer: _TorchStream(peer, group) for peer in peers})
        self.hosts = tuple(hosts.index(host) for host in hosts)

    def supports(self, device: str | torch.device) -> bool:
        """Return whether torch has a path for tensors of `device` that does not use the host."""
        return self._devices.get(torch.device(device).type) == "nccl"


def _backends_of(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the backend of each type of device."""
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, backend in pairs}  # noqa: C416  lists are no pairs


class _TorchStream:
    """The stream to one peer. Threads wait for torch, whose messages cannot be polled.

    gloo closes all connections when a message does not come in time. So none is asked for that
    might not come: one thread takes all that the peer sends, a size and then as many bytes.
    """

    alignment: Final = ELEMENT_BYTES

    def __init__(self, peer: int, group: dist.ProcessGroup | None) -> None:
        self.peer = peer
        self._group = group or dist.group.WORLD
        self._outgoing: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._unsent_bytes = 0
        self._chunks: deque[memoryview] = deque()
        self._unread_bytes = 0
        self._changed = threading.Condition()
        self._is_over = False
        """Of what the peer sends."""
        self._is_closed = False
        self._threads = [
            threading.Thread(target=loop, name=f"muster-torch-{peer}", daemon=True)
            for loop in (self._send_all, self._receive_all)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        return -1

    @property
    def has_unsent(self) -> bool:
        return self._unsent_bytes > 0

    def send(self, parts: Sequence[memoryview]) -> int:
        data = bytearray().join(parts)
        # Whole elements, as the reader's chunks begin where ours do. The rest comes with the next.
        size = len(data) - len(data) % ELEMENT_BYTES
        with self._changed:
            if self._is_over:
                raise ChannelClosed(self.peer)
            if self._unsent_bytes > _ROOM_BYTES or not size:
                return 0
            self._unsent_bytes += size
        self._outgoing.put(torch.frombuffer(data, dtype=torch.uint8, count=size))
        return size

    def receive(self, target: Target, offset: int, size_bytes: int) -> int:
        with self._changed:
            if not self._chunks:
                if self._is_over:
                    raise ChannelClosed(self.peer)
                return 0
            chunk = self._chunks[0]
            size = min(size_bytes, chunk.nbytes)
            fill(target, offset, chunk[:size])
            if size < chunk.nbytes:
                self._chunks[0] = chunk[size:]
            else:
                self._chunks.popleft()
            self._unread_bytes -= size
            self._changed.notify_all()
        return size

    def has_left(self) -> bool:
        return False

    def has_hung_up(self) -> bool:
        return self._is_over

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._outgoing.put(torch.empty(0, dtype=torch.uint8))
        for thread in self._threads:
            # The second one ends when the peer closes; gloo may abort if it is destroyed before.
            thread.join(_GOODBYE_SECONDS)

    def _send_all(self) -> None:
        is_open = True
        while is_open:
            data = self._outgoing.get()
            is_open = data.numel() > 0  # an empty message ends the peer's thread
            try:
                self._wait(self._group.send, torch.tensor([data.numel()]))
                if is_open:
                    self._wait(self._group.send, data)
            except RuntimeError:  # the peer is gone, which the other thread reports
                return
            with self._changed:
                self._unsent_bytes -= data.numel()

    def _receive_all(self) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            while True:
                self._wait(self._group.recv, size)
                if not size.item():
                    break
                data = torch.empty(int(size.item()), dtype=torch.uint8)
                self._wait(self._group.recv, data)
                with self._changed:
                    self._chunks.append(memoryview(data.numpy()))
                    self._unread_bytes += data.numel()
                    while self._unread_bytes > _ROOM_BYTES and not self._is_closed:
                        self._changed.wait()
        except RuntimeError:
            pass  # gloo: the peer is gone, or this rank has destroyed the group
        with self._changed:
            self._is_over = True

    def _wait(self, start: Any, tensor: torch.Tensor) -> None:  # noqa: ANN401  send or recv
        start([tensor], self.peer, _TAG).wait(_FOREVER)
