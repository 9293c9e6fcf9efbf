"""Whether a database's file is still where it was opened.

SQLite goes on reading one that was removed or moved, and may go on writing it: what is there nobody
will find again. So whoever begins a transaction looks, which costs a microsecond.
"""

import os
from pathlib import Path


class Whereabouts:
    """A file, remembered as what it is while it is opened by its name."""

    def __init__(self, path: Path) -> None:
        """Raises OSError unless it is there."""
        self._path = path
        self._opened = path.stat()

    def trouble(self) -> str | None:
        """Return what the file's name no longer leads to, as the end of a sentence on it."""
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return "is gone, moved or removed while it was open: put it back, or start afresh"
        except OSError:  # that it cannot be looked at now does not mean that it is another one
            return None
        if os.path.samestat(found, self._opened):
            return None
        return (
            "was replaced by another file while it was open: start the services again to use that"
        )
