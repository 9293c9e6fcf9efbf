"""Fences keep an older generation of a rank from committing, whenever it wakes up.

A process may be stopped between any two steps of a save, be replaced, and continue. Two orders
exclude that it commits then:

    the successor                             a save
    puts up its fence                         makes its temporary names (checkpoint and LATEST)
    removes older temporary names             looks for a newer fence
    reads what is there                       renames both

If a save looked before the fence was up, then each of its temporary names was there to be removed,
or its rename came before the successor's read.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from muster.checkpoints.errors import StaleGeneration
from muster.checkpoints.local import FileSystem
from muster.checkpoints.manifest import Fence, generation_of_temporary, revoked


class Fences:
    """The fences of one job in one rank's directory."""

    def __init__(
        self, files: FileSystem, directory: str, job_uid: str | None, remove: Callable[[str], None]
    ) -> None:
        """`remove` deletes the entry at a path, or warns that it cannot.

        Without a `job_uid`, when started by hand, the fences of every job count.
        """
        self._files: Final = files
        self._directory: Final = directory
        self._job_uid: Final = job_uid
        self._remove: Final = remove

    def newest(self) -> int:
        """Return the generation of the newest fence; -1 if there is none."""
        return max((fence.generation for fence in self._all()), default=-1)

    def put_up(self, generation: int) -> None:
        """Exclude older generations: none of them commits once this has returned.

        A fence need not survive a power cut: the process that it stops does not either.
        """
        own = Fence.of(generation, self._job_uid)
        with suppress(FileExistsError):
            self._files.close(self._files.create(f"{self._directory}/{own}"))
        for fence in self._all():
            if fence < own:
                self._remove(f"{self._directory}/{fence}")
        for name in self._files.list_directory(self._directory):
            left_by = generation_of_temporary(name)
            if left_by is not None and left_by <= generation:
                self._revoke(name)

    def refuse_if_stale(self, generation: int) -> None:
        """Raise `StaleGeneration` if there is a newer fence than that of `generation`."""
        newest = self.newest()
        if newest > generation:
            raise StaleGeneration(self._directory, generation, newest)

    def _all(self) -> list[Fence]:
        found = map(Fence.parse, self._files.list_directory(self._directory))
        job = Fence.of(0, self._job_uid).job
        return [fence for fence in found if fence and (self._job_uid is None or fence.job == job)]

    def _revoke(self, name: str) -> None:
        """Remove a temporary entry so that its writer cannot rename it, should it wake up."""
        path, gone = (f"{self._directory}/{entry}" for entry in (name, revoked(name)))
        if path != gone:
            # Renamed in one step: a directory emptied file by file might be filled meanwhile.
            with suppress(FileNotFoundError):
                self._files.rename(path, gone)
        self._remove(gone)
