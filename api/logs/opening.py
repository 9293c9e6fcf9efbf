"""The way to a log: through the job's own directories, and through no link.

A program may put links in the place of its logs, or of the directory that they are in. It can read
what they lead to, being of the service's user; who reads its logs here may not.
"""

import os
from pathlib import Path
from typing import Final

from muster.strange_files import open_directory, open_file, open_named_directory

OWN_DEPTH: Final = 2
"""Directories on the way that are the job's: its own, and that of its logs."""


def open_log(path: Path) -> int:
    """Return the descriptor of a log, or of what lies beside one. Raises OSError."""
    *above, name = path.parts[-OWN_DEPTH - 1 :]
    directory = open_named_directory(path.parents[OWN_DEPTH])
    try:
        for part in above:
            inner = open_directory(part, directory)
            os.close(directory)
            directory = inner
        return open_file(name, directory)
    finally:
        os.close(directory)
