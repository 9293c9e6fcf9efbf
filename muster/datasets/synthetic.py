"""A data set of any size from a seed: points scattered around one centre per class.

It is learnable (a linear classifier gets nearly all of it right), it streams, and the same
arguments give the same bytes on every machine: of ``random`` only ``random()`` is used, the one
method whose sequence Python promises to keep, and no function of the mathematics library.
"""

import random
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from muster.datasets.contents import Contents, DatasetFacts, read_facts
from muster.datasets.errors import DatasetNotWritable
from muster.datasets.listing import sorted_shard_names
from muster.datasets.writer import write_dataset

_NOISE_WIDTH: Final = 1.0
"""Coordinates of centres lie in [0, 1) and noise is even within half of this on either side:
classes overlap in every single feature, and hardly at all in eight of them together."""


def synthetic(
    *, samples: int = 2048, shards: int = 8, features: int = 16, classes: int = 4, seed: int = 0
) -> Contents:
    """Return a data set of this shape; its lines are made while they are read."""
    facts = DatasetFacts(
        kind="synthetic",
        samples=samples,
        shards=shards,
        features=features,
        classes=classes,
        seed=seed,
    )
    return Contents(facts, _lines(facts))


def ensure_synthetic(directory: Path) -> Path:
    """Return `directory` with the default data set in it, made now unless it is there already.

    It appears whole, by one rename: a crash leaves nothing at `directory`, and of several
    callers at once one wins and the others use what it made. Raises `DatasetNotWritable`.
    """
    if _is_complete(directory):
        return directory
    made = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
    try:
        write_dataset(made, synthetic())
        made.rename(directory)
    except OSError as error:
        if not _is_complete(directory):
            raise DatasetNotWritable(
                directory, f"{error.strerror}; it is no complete data set: remove it and try again"
            ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return directory


def _is_complete(directory: Path) -> bool:
    facts = read_facts(directory)
    if facts is None:
        return False
    names = sorted_shard_names(path.name for path in directory.iterdir())
    return len(names) == facts.shards


def _lines(facts: DatasetFacts) -> Iterator[bytes]:
    chance = random.Random(facts.seed).random  # noqa: S311  data, not secrets
    centres = [[chance() for _ in range(facts.features)] for _ in range(facts.classes)]
    # One formatting operation per line; three decimals are plenty, and short.
    template = b'{"x":[' + b",".join([b"%.3f"] * facts.features) + b'],"y":%d}'
    for _ in range(facts.samples):
        label = int(chance() * facts.classes)
        point = [middle + (chance() - 0.5) * _NOISE_WIDTH for middle in centres[label]]
        yield template % (*point, label)
