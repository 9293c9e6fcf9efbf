"""Generated data sets: synthetic points of any size from a seed, and the handwritten digits.

The same arguments give the same bytes on every machine: of ``random`` only ``random()`` is used,
the one method whose sequence Python promises to keep, and no function of the mathematics library.
"""

import random
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from muster.datasets.errors import DatasetError, DatasetNotWritable
from muster.datasets.schema import Contents
from muster.datasets.source import DatasetFacts, read_facts
from muster.datasets.writer import shards_in, write_dataset
from muster.host.extras import install_command

_NOISE_WIDTH: Final = 1.0
"""Centres lie in [0, 1), and noise is uniform within half of this on either side: classes overlap
in every single feature, and hardly at all in eight features together."""


def synthetic(
    *, samples: int = 2048, shards: int = 8, features: int = 16, classes: int = 4, seed: int = 0
) -> Contents:
    """Return points scattered around one centre per class; lines are made while they are read.

    A linear classifier gets nearly all of them right.
    """
    facts = DatasetFacts(
        kind="synthetic",
        samples=samples,
        shards=shards,
        features=features,
        classes=classes,
        seed=seed,
    )
    return Contents(facts, _synthetic_lines(facts))


def ensure_synthetic(directory: Path) -> Path:
    """Return `directory` with the default data set in it, generating it if necessary.

    It appears complete, by one rename: a crash leaves nothing at `directory`, and concurrent
    callers share what the first one made. Raises `DatasetNotWritable`.
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
                directory,
                f"{error.strerror}; it is not a complete data set: remove it and try again",
            ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return directory


def _is_complete(directory: Path) -> bool:
    facts = read_facts(directory)
    return facts is not None and len(shards_in(directory)) == facts.shards


def _synthetic_lines(facts: DatasetFacts) -> Iterator[bytes]:
    chance = random.Random(facts.seed).random  # noqa: S311  data, not secrets
    centres = [[chance() for _ in range(facts.features)] for _ in range(facts.classes)]
    # One formatting operation per line; three decimals are plenty, and short.
    template = b'{"x":[' + b",".join([b"%.3f"] * facts.features) + b'],"y":%d}'
    for _ in range(facts.samples):
        label = int(chance() * facts.classes)
        point = [middle + (chance() - 0.5) * _NOISE_WIDTH for middle in centres[label]]
        yield template % (*point, label)


_FEATURES: Final = 64
_CLASSES: Final = 10
_DARKEST: Final = 16
_HELD_OUT_SHARE: Final = 5


def digits(*, shards: int, seed: int) -> Contents:
    """Return the UCI handwritten digits; raises `DatasetError` without scikit-learn.

    1797 images of 8 x 8 pixels in 17 shades, shuffled; a fifth is held out for validation.
    """
    images = _load()
    ordered = [
        b'{"x":[%s],"y":%d}' % (",".join(f"{shade / _DARKEST:g}" for shade in row).encode(), label)
        for row, label in zip(images.data, images.target, strict=True)
    ]
    lines = _shuffled(ordered, seed)
    held_out = len(lines) // _HELD_OUT_SHARE
    facts = DatasetFacts(
        kind="digits",
        samples=len(lines) - held_out,
        held_out=held_out,
        shards=shards,
        features=_FEATURES,
        classes=_CLASSES,
        seed=seed,
    )
    return Contents(facts, lines[held_out:], lines[:held_out])


def _load() -> Any:  # noqa: ANN401  scikit-learn has no types
    try:
        # Optional, and takes a second to import.
        from sklearn.datasets import load_digits  # noqa: PLC0415
    except ImportError:
        raise DatasetError(
            "the handwritten digits come with scikit-learn, which is not installed: "
            f"run {install_command('digits')}, or use muster dataset synthetic"
        ) from None
    return load_digits()


def _shuffled(lines: list[bytes], seed: int) -> list[bytes]:
    chance = random.Random(seed)  # noqa: S311  data, not secrets
    return sorted(lines, key=lambda _: chance.random())
