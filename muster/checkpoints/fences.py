"""What keeps older generations of a rank from committing, whenever they wake up.

A process may be stopped between any two steps of a save, be replaced, and go on. So whoever comes
next first puts up a fence, then takes away every temporary name of older generations, and only then
looks what there is. A save makes its temporary names first, that of the checkpoint and that of
LATEST, then looks for a fence, then renames both. If it looked before the fence was up, each name
was there to be taken, or its rename is older than all that its successor has read. There is no
instant between.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from muster.checkpoints.errors import StaleGeneration
from muster.checkpoints.filesystem import FileSystem
from muster.checkpoints.names import Fence, generation_of_temporary, out_of_reach


class Fences:
    """The fences in one rank's directory that concern one job."""

    def __init__(
        self, files: FileSystem, directory: str, job_uid: str | None, remove: Callable[[str], None]
    ) -> None:
        """`remove` deletes what is at a path, or says that it cannot.

        Started by hand, without a `job_uid`, every job of the same id is the same.
        """
        self._files: Final = files
        self._directory: Final = directory
        self._job_uid: Final = job_uid
        self._remove: Final = remove

    def newest(self) -> int:
        """Return the generation of the newest fence; -1 if there is none."""
        return max((fence.generation for fence in self._all()), default=-1)

    def put_up(self, generation: int) -> None:
        """Shut out older generations: none commits once this has returned.

        It need not survive a power cut: whoever it is for does not either.
        """
        own = Fence.of(generation, self._job_uid)
        with suppress(FileExistsError):
            self._files.close(self._files.create(f"{self._directory}/{own}"))
        for fence in self._all():
            if fence < own:
                self._remove(f"{self._directory}/{fence}")
        for text in self._files.list_directory(self._directory):
            left_by = generation_of_temporary(text)
            if left_by is not None and left_by <= generation:
                self._take_away(text)

    def refuse_if_stale(self, generation: int) -> None:
        """Raise `StaleGeneration` if there is a newer fence than that of `generation`."""
        newest = self.newest()
        if newest > generation:
            raise StaleGeneration(self._directory, generation, newest)

    def _all(self) -> list[Fence]:
        found = map(Fence.parse, self._files.list_directory(self._directory))
        job = Fence.of(0, self._job_uid).job
        return [fence for fence in found if fence and (self._job_uid is None or fence.job == job)]

    def _take_away(self, text: str) -> None:
        """Remove something temporary that its writer, should it wake up, must not find any more."""
        path, away = (f"{self._directory}/{name}" for name in (text, out_of_reach(text)))
        if path != away:
            # In one step: a directory that is emptied file by file may be filled again meanwhile.
            with suppress(FileNotFoundError):
                self._files.rename(path, away)
        self._remove(away)
