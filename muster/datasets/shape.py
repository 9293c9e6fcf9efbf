"""How many features a data set's samples have, and of how many classes they are."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from muster.contracts.position import Position
from muster.datasets.contents import read_facts
from muster.datasets.reader import read_lines
from muster.datasets.samples import LabelledSample, parse_sample


class SampleShape(NamedTuple):
    """What is alike in all samples."""

    features: int
    classes: int

    def decoder(self) -> msgspec.json.Decoder[Any]:
        """Return a decoder that refuses a sample of another shape, saying what is wrong."""
        length = msgspec.Meta(min_length=self.features, max_length=self.features)
        label = msgspec.Meta(ge=0, lt=self.classes)
        sample = msgspec.defstruct(
            "Sample", [("x", Annotated[list[float], length]), ("y", Annotated[int, label])]
        )
        return msgspec.json.Decoder(sample)


def shape_of(
    directory: Path, shards: Sequence[Path], *, lines_limit: int | None = None
) -> SampleShape:
    """Return the shape as the facts of `directory` say, or as the first lines of `shards` show.

    Without facts, all lines are read unless there is a limit. Raises `InvalidSample`.
    """
    facts = read_facts(directory)
    if facts is not None:
        return SampleShape(facts.features, facts.classes)
    decoder = msgspec.json.Decoder(LabelledSample)
    features = classes = 0
    for line, shard_idx, line_idx in islice(read_lines(shards, Position()), lines_limit):
        shard = shards[shard_idx]
        sample = parse_sample(line, decoder, shard=shard, line_number=line_idx)
        features = features or len(sample.x)
        classes = max(classes, sample.y + 1)
    return SampleShape(features, classes)
