"""The store of a discovered group, over a network that loses notes."""

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from muster.torch.distributed import store as module
from muster.torch.distributed.store import MeshStore

MEMBERS = [SimpleNamespace(process_id=f"p-{rank}") for rank in range(2)]
Readers = dict[str, Callable[[str, bytes], bytes | None]]


class Lossy:
    """The network of rank 1, which loses every other note, and delivers the rest twice."""

    def __init__(self, readers: Readers) -> None:
        self.readers: Readers = {}
        self.members = lambda: MEMBERS
        self._far = readers
        self._sent = 0

    def send_note(self, _process_id: str, topic: str, payload: bytes) -> None:
        self._sent += 1
        for _ in range(2 * (self._sent % 2 == 0)):
            if reply := self._far[topic]("p-1", payload):
                self.readers[topic]("p-0", reply)


def store_of(rank: int, network: Any) -> MeshStore:  # noqa: ANN401  a fake
    mesh = SimpleNamespace(network=network, check=lambda _members: None)
    backend: Any = SimpleNamespace(rank=rank, members=MEMBERS, mesh=mesh)
    made = MeshStore(backend, "topic")
    made.set_timeout(timedelta(seconds=20))
    return made


def test_a_request_counts_once_however_often_its_note_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.1)
    readers: Readers = {}
    own = store_of(0, SimpleNamespace(readers=readers))
    far = store_of(1, Lossy(readers))
    assert [far.add("count", 1) for _ in range(3)] == [1, 2, 3]
    assert own.add("count", 1) == 4
