"""What members tell each other in words: values, brought to all of them."""

from typing import Final, TypeVar

import msgspec

from muster.collectives.backend import Backend
from muster.collectives.gathering import all_gather

PEER_PATIENCE_SECONDS: Final = 30 * 24 * 3600.0
"""A rank waits for its peers as long as the layout holds: who is gone is the coordinator's to say,
and a newer layout ends every wait."""

Told = TypeVar("Told")


def gather(backend: Backend, own: Told, kind: type[Told]) -> list[Told]:
    """Return what every member tells, in the order of their places."""
    note = msgspec.msgpack.encode(own)
    notes = all_gather(backend, note, timeout_seconds=PEER_PATIENCE_SECONDS)
    return [msgspec.msgpack.decode(note, type=kind) for note in notes]
