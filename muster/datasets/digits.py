"""The UCI handwritten digits as a data set: real, small, and carried by scikit-learn.

1797 images of 8 x 8 pixels in 17 shades, shuffled; a fifth is held out for validation.
"""

import random
from typing import Final, Protocol

from muster.datasets.contents import Contents, DatasetFacts
from muster.datasets.errors import DigitsUnavailable

_FEATURES: Final = 64
_CLASSES: Final = 10
_DARKEST: Final = 16
_HELD_OUT_SHARE: Final = 5


class _Images(Protocol):
    """As much as we use of what scikit-learn hands out."""

    data: list[list[float]]
    target: list[int]


def digits(*, shards: int, seed: int) -> Contents:
    """Return the digits, the same lines for a seed for ever; raises `DigitsUnavailable`."""
    lines = _shuffled(_lines(_load()), seed)
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


def _load() -> _Images:
    try:
        # Here, and not above: it costs a second, and it is optional.
        from sklearn.datasets import load_digits  # noqa: PLC0415
    except ImportError:
        raise DigitsUnavailable from None
    images: _Images = load_digits()
    return images


def _lines(images: _Images) -> list[bytes]:
    return [
        b'{"x":[%s],"y":%d}' % (",".join(f"{shade / _DARKEST:g}" for shade in row).encode(), label)
        for row, label in zip(images.data, images.target, strict=True)
    ]


def _shuffled(lines: list[bytes], seed: int) -> list[bytes]:
    # random() is the one method whose sequence Python promises to keep; shuffle() is not.
    chance = random.Random(seed)  # noqa: S311  data, not secrets
    return sorted(lines, key=lambda _: chance.random())
