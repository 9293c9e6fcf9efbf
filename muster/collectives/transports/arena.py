"""The layout of the memory that one rank shares with the other ranks of its host.

    header | words | rings | slots | halves

Each process has one memfd, which the agent creates and passes as a descriptor. Only the owner
writes to it; peers map it read-only. A process that was stopped, replaced and resumed can
therefore only write to memory that is no longer read.

*Words* are int64, each on its own cache line: counters that the owner raises and others read.
*Rings* carry messages, one per peer. *Slots* hold the sums of blocks, *halves* two copies of them
if they are short. The file is sparse: untouched pages take no memory.
"""

import mmap
import os
import platform
import struct
import sys
from dataclasses import astuple, dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.errors import BackendUnavailable, PeerRefused, TransportFailed

SHORT_BYTES: Final = 16 << 10
"""Up to this length every rank sums the whole vector, which is cheaper than a second wait."""

CLOSED: Final = 0
BARRIER: Final = 8
PUBLISHED: Final = 16
SUMMED: Final = 24
"""Indices of words; eight words fill a cache line."""

_FIRST_RING_WORD: Final = 32
LINE_WORDS: Final = 8
_WORD_BYTES: Final = 8
_PAGE_BYTES: Final = 4096
_FLOAT_BYTES: Final = 4

_MAGIC: Final = b"mstarena"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sQQQQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes that determine all offsets."""

    slot_count: int
    elements: int
    """Of one slot, float32."""
    max_ranks: int = 64
    """Of a group; each has a ring."""
    ring_bytes: int = 1 << 20

    @property
    def is_short(self) -> bool:
        return self.elements * _FLOAT_BYTES <= SHORT_BYTES

    @property
    def word_count(self) -> int:
        return _FIRST_RING_WORD + 2 * self.max_ranks * LINE_WORDS

    @property
    def rings_offset(self) -> int:
        return _PAGE_BYTES + _whole_pages(self.word_count * _WORD_BYTES)

    @property
    def slots_offset(self) -> int:
        return self.rings_offset + _whole_pages(self.max_ranks * self.ring_bytes)

    @property
    def halves_offset(self) -> int:
        return self.slots_offset + _whole_pages(self.slot_count * self.elements * _FLOAT_BYTES)

    @property
    def size_bytes(self) -> int:
        return self.halves_offset + 2 * (self.halves_offset - self.slots_offset) * self.is_short

    def sent_word(self, peer: int) -> int:
        """Index of the word that counts the bytes written to the ring of `peer`."""
        return _FIRST_RING_WORD + peer * LINE_WORDS

    def taken_word(self, peer: int) -> int:
        """Index of the word that counts the bytes read from `peer`."""
        return _FIRST_RING_WORD + (self.max_ranks + peer) * LINE_WORDS


class Arena:
    """A mapping of one rank's memory; it lives as long as any array of it."""

    def __init__(self, memory: mmap.mmap, geometry: Geometry) -> None:
        self.geometry = geometry
        self._bytes = memoryview(memory)
        # Not an array: a memoryview loads and stores one word faster, as a plain integer.
        words = self._bytes[_PAGE_BYTES : _PAGE_BYTES + geometry.word_count * _WORD_BYTES]
        self.words: memoryview[int] = words.cast("q")
        shape = (geometry.slot_count, geometry.elements)
        self.slots: NDArray[np.float32] = np.ndarray(
            shape, np.float32, memory, geometry.slots_offset
        )
        self.halves: NDArray[np.float32] = np.ndarray(
            (2 * geometry.is_short, *shape), np.float32, memory, geometry.halves_offset
        )
        """(2, slot count, elements) where vectors are short, else empty."""

    @classmethod
    def create(cls, descriptor: int, geometry: Geometry) -> "Arena":
        """Size and map this rank's own, unused memory, before peers map it.

        The caller keeps the descriptor and may close it. Raises `BackendUnavailable` on an
        unsupported machine or for memory that was used before, and `TransportFailed`.
        """
        refuse_other_machines()
        if os.fstat(descriptor).st_size:
            raise BackendUnavailable(
                "this memory has been an arena before: give every process a new one"
            )
        memory = map_memory(descriptor, geometry.size_bytes, is_writable=True)
        arena = cls(memory, geometry)
        # The header comes last: a peer that finds it finds everything else in place.
        memory[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, *astuple(geometry))
        return arena

    @classmethod
    def attach(cls, descriptor: int) -> "Arena":
        """Map a peer's memory read-only; raises `PeerRefused` if it is not an arena (yet).

        The caller keeps the descriptor and may close it. The mapping may serve many groups.
        """
        refuse_other_machines()
        header = os.pread(descriptor, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
        magic, version, slot_count, elements, max_ranks, ring_bytes = _HEADER.unpack(header)
        if magic != _MAGIC or version != _VERSION:
            raise PeerRefused(
                "a peer's shared memory is not an arena of this version: "
                "use the same Muster version everywhere"
            )
        geometry = Geometry(
            slot_count=slot_count, elements=elements, max_ranks=max_ranks, ring_bytes=ring_bytes
        )
        # Reading beyond the end of a mapped file is a SIGBUS, so do not trust the header.
        if os.fstat(descriptor).st_size < geometry.size_bytes:
            raise PeerRefused(
                f"a peer's arena is shorter than the {geometry.size_bytes} bytes it says: "
                "end that rank"
            )
        return cls(map_memory(descriptor, geometry.size_bytes, is_writable=False), geometry)

    def ring(self, peer: int) -> memoryview:
        """Return the ring for `peer`."""
        start = self.geometry.rings_offset + peer * self.geometry.ring_bytes
        return self._bytes[start : start + self.geometry.ring_bytes]


def map_memory(descriptor: int, size_bytes: int, *, is_writable: bool) -> mmap.mmap:
    """Map a shared file from its start; a writable one is enlarged first if needed."""
    try:
        if is_writable and os.fstat(descriptor).st_size < size_bytes:
            os.ftruncate(descriptor, size_bytes)
        return mmap.mmap(
            descriptor,
            size_bytes,
            flags=mmap.MAP_SHARED,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0),
        )
    except OSError as error:
        raise TransportFailed(
            f"shared memory of {size_bytes} bytes cannot be mapped ({error}): "
            "free some memory, raise the limit, or use TCP"
        ) from error


def refuse_other_machines() -> None:
    """Raise `BackendUnavailable` on machines where stores may become visible out of order.

    The code uses no memory fences. It relies on x86, which keeps the order of stores and of loads,
    and on CPython, which reads and writes an aligned word in one instruction. (Large copies may use
    non-temporal stores; the C library ends them with a fence.)
    """
    if platform.machine() not in {"x86_64", "AMD64"} or sys.implementation.name != "cpython":
        raise BackendUnavailable(
            f"shared memory needs CPython on x86-64, not {sys.implementation.name} on "
            f"{platform.machine()}: use TCP"
        )


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
