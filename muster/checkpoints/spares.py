"""The directories of retired small checkpoints, kept to be written again.

To delete a directory of two files and to make another one costs a journal about as much as all the
rest of a small save. So a retired one is hidden under its temporary name, and a later save fills it
and gives it its new name: nothing is allocated, and the flush of a file that keeps its length
writes the data alone.

One rule makes this safe: a spare is written to only after the directory has been flushed since it
was hidden. Before that a power cut could bring its old name back, with a stranger's bytes in it.
"""

from typing import Final

from muster.checkpoints.names import CheckpointName

RECYCLED_LIMIT_BYTES: Final = 1 << 20
"""A larger state is bound by its bytes, and two copies more of it would be missed on a disk."""


class Spares:
    """Hidden directories by the names they had; at rest one is ready and one is not yet."""

    def __init__(self) -> None:
        self._hidden: list[CheckpointName] = []
        self._ready: list[CheckpointName] = []

    def __contains__(self, name: CheckpointName) -> bool:
        return name in self._hidden or name in self._ready

    @property
    def wanted(self) -> bool:
        """Whether one more would be of use."""
        return not self._hidden

    def hide(self, name: CheckpointName) -> None:
        """Take a directory that has its temporary name now, though not durably."""
        self._hidden.append(name)

    def flushed(self) -> None:
        """The directory they lie in was flushed: what was hidden stays hidden."""
        self._ready += self._hidden
        self._hidden.clear()

    def take(self) -> CheckpointName | None:
        """Return one that may be written to, or None."""
        return self._ready.pop() if self._ready else None

    def empty(self) -> list[CheckpointName]:
        """Return all there are, to be deleted: nothing will be written any more."""
        rest = self._hidden + self._ready
        self._hidden.clear()
        self._ready.clear()
        return rest
