"""What a data set is made of, said before a byte of it is written, and found again afterwards."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

FACTS_NAME: Final = "dataset.json"
HELD_OUT_NAME: Final = "test.jsonl"


class DatasetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``dataset.json``; with the seed it says everything about what we made."""

    kind: str
    samples: int
    """Those to train on, over all shards."""
    held_out: int = 0
    """Those in ``test.jsonl``, which no shard holds."""
    shards: int
    features: int
    classes: int
    seed: int


class Contents(NamedTuple):
    """A data set to be written: `lines` is read once and may be far larger than memory."""

    facts: DatasetFacts
    lines: Iterable[bytes]
    held_out: Iterable[bytes] = ()


def read_facts(directory: Path) -> DatasetFacts | None:
    """Return the facts of a data set that was written to its end, None for any other directory."""
    try:
        return msgspec.json.decode((directory / FACTS_NAME).read_bytes(), type=DatasetFacts)
    except (OSError, msgspec.MsgspecError):
        return None
