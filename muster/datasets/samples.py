"""From a line to a sample: JSON, checked, with an error that says which line of which file."""

from pathlib import Path
from typing import TypeVar

import msgspec

from muster.datasets.errors import InvalidSample

Shape = TypeVar("Shape")


class LabelledSample(msgspec.Struct, frozen=True):
    """A line of the data sets we make: features and the class they belong to."""

    x: list[float]
    y: int


def parse_sample(
    line: bytes, decoder: msgspec.json.Decoder[Shape], *, shard: Path, line_number: int
) -> Shape:
    """Return what `line` says, in the decoder's shape (``Decoder()`` takes any JSON).

    `line_number` counts from 1: the `line_idx` after the line, as the reader yields it. Raises
    `InvalidSample`.
    """
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidSample(shard, line_number, f"no sample, {error}", line) from error
