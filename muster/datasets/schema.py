"""What a data set consists of: its facts, its lines, and the schema of its samples."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from muster.contracts.shards import Position
from muster.datasets.reader import parse_sample, read_lines

FACTS_NAME: Final = "dataset.json"
HELD_OUT_NAME: Final = "test.jsonl"


class DatasetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``dataset.json``: how a generated data set was made."""

    kind: str
    samples: int  # samples of all shards
    held_out: int = 0  # samples in ``test.jsonl``, which are in no shard
    shards: int
    features: int
    classes: int
    seed: int


class Contents(NamedTuple):
    """A data set to write; `lines` is read once and may be larger than memory."""

    facts: DatasetFacts
    lines: Iterable[bytes]
    held_out: Iterable[bytes] = ()


def read_facts(directory: Path) -> DatasetFacts | None:
    """Return the facts of a complete generated data set; None for any other directory."""
    try:
        return msgspec.json.decode((directory / FACTS_NAME).read_bytes(), type=DatasetFacts)
    except (OSError, msgspec.MsgspecError):
        return None


class LabelledSample(msgspec.Struct, frozen=True):
    """A line of a generated data set: features and the class they belong to."""

    x: list[float]
    y: int


class SampleSchema(NamedTuple):
    """The number of features and classes of all samples."""

    features: int
    classes: int

    def decoder(self) -> msgspec.json.Decoder[Any]:
        """Return a decoder that refuses samples with other numbers."""
        length = msgspec.Meta(min_length=self.features, max_length=self.features)
        label = msgspec.Meta(ge=0, lt=self.classes)
        sample = msgspec.defstruct(
            "Sample", [("x", Annotated[list[float], length]), ("y", Annotated[int, label])]
        )
        return msgspec.json.Decoder(sample)


def schema_of(
    directory: Path, shards: Sequence[Path], *, lines_limit: int | None = None
) -> SampleSchema:
    """Return the schema from the facts of `directory`, or else from the lines of `shards`.

    Without facts, all lines are read unless there is a limit. Raises `InvalidSample`.
    """
    facts = read_facts(directory)
    if facts is not None:
        return SampleSchema(facts.features, facts.classes)
    decoder = msgspec.json.Decoder(LabelledSample)
    features = classes = 0
    for line, shard_idx, line_idx in islice(read_lines(shards, Position()), lines_limit):
        shard = shards[shard_idx]
        sample = parse_sample(line, decoder, shard=shard, line_number=line_idx)
        features = features or len(sample.x)
        classes = max(classes, sample.y + 1)
    return SampleSchema(features, classes)
