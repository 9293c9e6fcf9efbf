"""A rank's copy of the one model: the state, and where in the data it stands.

There are two sets of arrays, used in turn: a step writes its new state into the half that is not in
use and then takes it over in one assignment. Whatever goes wrong before that leaves the last
committed state whole, ready to be given to somebody else.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from muster.collectives.backend import Backend
from muster.contracts.messages import EpochDone
from muster.contracts.position import Position
from muster.shapes import read_only

Arrays: TypeAlias = Mapping[str, NDArray[Any]]


class Committed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is behind a replica: where it stands, and what every whole pass has consumed."""

    position: Position
    epochs: tuple[EpochDone, ...] = ()


NOTHING: Final = Committed(position=Position(step=-1))
"""Behind a replica that has no state yet."""


class Replica:
    """A state and what is behind it, always of one step."""

    def __init__(self, shape: Arrays) -> None:
        """`shape` is any state of the program: its names, shapes and dtypes hold for ever."""
        self.state: Arrays = {}
        """To be read, and only until the next step but one is taken."""
        self.committed = NOTHING
        self._half, self.other = _memory(shape), _memory(shape)

    @property
    def is_empty(self) -> bool:
        return self.committed == NOTHING

    @property
    def position(self) -> Position:
        return self.committed.position

    def flip(self, state: Arrays, committed: Committed) -> None:
        """Take over a state that is complete: `other`, or one that is copied there."""
        if state is not self.other:
            for name, array in self.other.items():
                array[...] = state[name]
        self._half, self.other = self.other, self._half
        self.state, self.committed = read_only(self._half), committed

    def digest(self) -> str:
        """Return 32 hexadecimal digits of state and position: equal bits, equal digits."""
        hasher = xxh3_128(msgspec.json.encode(self.committed))
        for name, array in self.state.items():
            hasher.update(name.encode())
            hasher.update(_bytes_of(array))
        return hasher.hexdigest()

    def send(self, backend: Backend, peer: int) -> None:
        """Give the replica to a peer that calls `receive`."""
        committed = msgspec.msgpack.encode(self.committed)
        backend.send(peer, len(committed).to_bytes(8, "little"))
        backend.send(peer, committed)
        for array in self.state.values():
            backend.send(peer, _bytes_of(array))

    def receive(self, backend: Backend, peer: int) -> None:
        """Become what a peer sends; a transfer that is cut short changes nothing."""
        size_bytes = int.from_bytes(backend.receive(peer, 8), "little")
        committed = msgspec.msgpack.decode(backend.receive(peer, size_bytes), type=Committed)
        for array in self.other.values():
            backend.receive_into(peer, _bytes_of(array))
        self.flip(self.other, committed)


def _memory(shape: Arrays) -> dict[str, NDArray[Any]]:
    """Return arrays to write to, in the order of their names.

    Their pages are faulted in here, while the others still train without this rank: `np.zeros`
    would leave that for the step in which all wait for it.
    """
    return {name: np.full(shape[name].shape, 0, shape[name].dtype) for name in sorted(shape)}


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
