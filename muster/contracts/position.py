"""Where in its data a rank is, exactly.

A sample is consumed if and only if its step is committed, so the position moves with `step` and
goes into the checkpoint beside the state: what is read after a recovery starts there.
"""

import msgspec

HASH_MODULUS = 1 << 64


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Steps done, and the lines behind them.

    `shard_idx` indexes the rank's own list of shards, `line_idx` counts the lines of that shard
    already consumed. `consumed` and `consumed_hash` are the number and the sum (modulo 2**64) of
    the xxh3 hashes of the lines consumed in this epoch: they roll back with the checkpoint, so
    that exactly-once can be proved from what is committed.
    """

    step: int = 0
    epoch: int = 0
    shard_idx: int = 0
    line_idx: int = 0
    consumed: int = 0
    consumed_hash: int = 0
