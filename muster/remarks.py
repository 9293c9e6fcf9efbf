"""A sentence to a person that costs no process its life: the disk of a log may be full.

What cannot be written is lost, and the speaker goes on; of a sentence that there is room for half
of, the rest is lost. Nothing of it stays in a buffer either: the interpreter would meet it again at
the end, and exit with 120 instead of what the process means.
"""

import sys
from contextlib import suppress
from typing import TextIO


def remark(sentence: str) -> None:
    """Say it on standard error, if that can be heard; never raises for want of a listener."""
    with suppress(Exception):  # full, closed, gone, or whatever a program has put in its place
        _write(f"{sentence}\n", sys.stderr)


def narrate(sentence: str) -> None:
    """Say it on standard output, likewise: how the work goes on."""
    with suppress(Exception):
        _write(f"{sentence}\n", sys.stdout)


def finish() -> None:
    """Write out what a program has printed and still waits, as far as there is room for it."""
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(Exception):
        sys.stderr.flush()


def _write(text: str, output: TextIO) -> None:
    """Write past the buffer, if there is one, but after what it holds."""
    output.flush()
    raw = getattr(getattr(output, "buffer", None), "raw", None)
    if raw is None:
        output.write(text)
        output.flush()
    else:
        raw.write(text.encode(output.encoding, "backslashreplace"))
