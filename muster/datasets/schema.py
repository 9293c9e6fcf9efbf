"""What a data set consists of: its facts, its lines, and the schema of its samples."""

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec

from muster.contracts.shards import Position, Reading
from muster.datasets.reader import WHOLE, locations, parse_sample, read_lines
from muster.datasets.source import DatasetFacts, DataSource


class Contents(NamedTuple):
    """A data set to write; `lines` is read once and may be larger than memory."""

    facts: DatasetFacts
    lines: Iterable[bytes]
    held_out: Iterable[bytes] = ()


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
    source: DataSource, reading: Reading = WHOLE, *, lines_limit: int | None = None
) -> SampleSchema:
    """Return the schema from the facts of `source`, or else from the lines of a rank's shards.

    Without facts, all lines are read unless there is a limit. Raises `InvalidSample`.
    """
    facts = source.facts
    if facts is not None:
        return SampleSchema(facts.features, facts.classes)
    decoder = msgspec.json.Decoder(LabelledSample)
    features = classes = 0
    shown = locations(source, reading)
    lines = read_lines(source, Position(), reading)
    for line, shard_idx, line_idx in islice(lines, lines_limit):
        sample = parse_sample(line, decoder, shard=shown[shard_idx], line_number=line_idx)
        features = features or len(sample.x)
        classes = max(classes, sample.y + 1)
    return SampleSchema(features, classes)
