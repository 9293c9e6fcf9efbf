"""Which part of the data belongs to a rank, and the rank's exact position in it."""

from itertools import pairwise
from typing import Final

import msgspec

HASH_MODULUS: Final = 1 << 64


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rank's place in its data; saved with the state, so a restart continues exactly there.

    A sample is consumed if and only if its step is committed. `shard_idx` indexes the rank's own
    list of shards, `line_idx` counts the consumed lines of that shard. `consumed` and
    `consumed_hash` are the number of lines consumed in this epoch and the sum of their xxh3 hashes
    modulo 2**64: they roll back with the checkpoint, and so prove exactly-once consumption.
    """

    step: int = 0
    epoch: int = 0
    shard_idx: int = 0
    line_idx: int = 0
    consumed: int = 0
    consumed_hash: int = 0


class Shard(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a shard file without reading it."""

    name: str
    size_bytes: int
    lines: int | None = None
    hash_sum: int | None = None  # the sum of the xxh3 of every line modulo 2**64
    xxh3: str | None = None  # of all bytes, 16 hexadecimal digits


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Who reads, and how much is to come: rank's own shards in order, epoch after epoch."""

    rank: int = 0
    world_size: int = 1
    epochs_left: int = 0  # after the present one

    def shard_idxs(self, shards: int) -> range:
        """Return which of so many shards this rank reads, in order."""
        return range(self.rank, shards, self.world_size)


def ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into `parts` contiguous ranges ``[start, stop)``.

    Each range has ``total // parts`` numbers, and the first ``total % parts`` one more.
    """
    bounds = [part * (total // parts) + min(part, total % parts) for part in range(parts)]
    return list(pairwise([*bounds, total])) if parts else []
