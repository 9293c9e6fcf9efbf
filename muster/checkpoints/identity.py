"""The sha256 of a state: equal if and only if two runs computed the same.

It covers arrays (name, dtype, shape, bytes), values and the position, and nothing that says when,
where or by which incarnation they were saved, so that a run that was killed can be held against
one that was not. Slower than the checksum of a save, therefore never part of one.
"""

from hashlib import sha256

import msgspec

from muster.checkpoints.reader import Checkpoint
from muster.checkpoints.state import State, pack
from muster.contracts.position import Position


def identity(state: State, position: Position) -> str:
    """Return 64 hexadecimal digits; raises `UnsupportedState` for what cannot be saved either."""
    packed = pack(state)
    digest = sha256(msgspec.json.encode([packed.values, position], order="sorted"))
    for buffer in packed.buffers:
        digest.update(buffer)
    return digest.hexdigest()


def identity_of(checkpoint: Checkpoint) -> str:
    """Return the identity of a restored checkpoint: that of the state when it was saved."""
    return identity(checkpoint.state, checkpoint.position)
