"""A person who waits for a command is told what the command waits for."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Final

from muster.remarks import remark

PATIENCE_SECONDS: Final = 1.5
"""A person who has heard nothing for so long is told what is waited for."""


@contextmanager
def said_if_it_lasts(sentence: str) -> Iterator[None]:
    """Say it on standard error, unless what is done meanwhile is done soon."""
    saying = Timer(PATIENCE_SECONDS, remark, [f"muster: {sentence}"])
    saying.start()
    try:
        yield
    finally:
        saying.cancel()
