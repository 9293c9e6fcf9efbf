"""Messages to a person that never fail, because the disk of a log may be full.

Text that cannot be written is lost. It must not stay in a buffer either: the interpreter would
fail on it at exit and replace the exit code by 120.
"""

import sys
from contextlib import suppress
from typing import TextIO


class LastMessage:
    """The last message that was given, so that one that comes with every attempt is given once."""

    text: str | None = None

    def is_new(self, text: str | None) -> bool:
        """Return whether the text differs from the last one, and keep it."""
        last, self.text = self.text, text
        return text != last


def print_stderr(sentence: str) -> None:
    """Print a line on standard error; never raises."""
    with suppress(Exception):  # full, closed, or replaced by the program
        _write(f"{sentence}\n", sys.stderr)


def print_stdout(sentence: str) -> None:
    """Print a line on standard output; never raises."""
    with suppress(Exception):
        _write(f"{sentence}\n", sys.stdout)


def flush_streams() -> None:
    """Flush what a program has printed, as far as possible."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _write(text: str, stream: TextIO) -> None:
    """Write past the buffer if there is one, after its content."""
    stream.flush()
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if raw is None:
        stream.write(text)
        stream.flush()
    else:
        raw.write(text.encode(stream.encoding, "backslashreplace"))
