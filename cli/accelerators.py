"""How many GPUs a program that is started here finds, with no torch to ask."""

import re
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Final

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""Names those that a program may use, by numbers or by ids; unset, it may use all."""


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many of the GPUs that are here the environment leaves, as CUDA counts them."""
    present = len(list(devices.glob("nvidia[0-9]*")))
    if VISIBLE not in environ:
        return present
    words = (word.strip() for word in environ[VISIBLE].split(","))
    named = list(takewhile(lambda word: _is_one(word, present), words))
    # Who is named twice is taken for a mistake, and then nobody is visible.
    return len(named) if len(set(named)) == len(named) else 0


def _is_one(word: str, present: int) -> bool:
    """Whether a word may name a GPU. After one that does not no more are looked at."""
    if re.fullmatch("[0-9]{1,9}", word):
        return int(word) < present
    return present > 0 and word.startswith(("GPU-", "MIG-"))
