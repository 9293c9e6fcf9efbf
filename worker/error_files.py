"""The error that a program has written down before it ended, as torch's `@record` does.

The file is a stranger's work: it may be anything, half of it, or no file at all. Then nothing was
written down, and the end of the log has to do.
"""

from pathlib import Path
from typing import Final

import msgspec

from muster.strange_files import content_of

FILE_LIMIT_BYTES: Final = 1 << 20
"""More than any traceback is long; a longer file is not read."""


class _Said(msgspec.Struct):
    message: str


class _ErrorFile(msgspec.Struct):
    """What is of interest in it; the rest, a traceback among it, is in the log as well."""

    message: _Said | str


_DECODER: Final = msgspec.json.Decoder(_ErrorFile)


def error_in(path: Path) -> str | None:
    """Return the error in one line or several; None if there is none that makes sense."""
    try:
        said = _DECODER.decode(content_of(path, FILE_LIMIT_BYTES)).message
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    words = said if isinstance(said, str) else said.message
    return words.strip() or None
