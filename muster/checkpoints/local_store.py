"""A directory of checkpoints on a disk: saved durably, fenced by generation.

A commit is a fixed order of durable steps. Each makes the next one safe, and a power cut between
any two leaves intact what LATEST names:

    write state and manifest into a temporary directory, fsync each   what will be named is whole
    fsync the temporary directory                                     and complete
    write the next LATEST into a temporary file, fsync                so is what will name it
    look for a newer fence                                            no successor has replaced us
    rename it to its final name, fsync the rank's directory           it exists
    replace LATEST, fsync the rank's directory                        it is found: acknowledged

Only then are older checkpoints renamed to temporary names and deleted: nothing depends on them.

Deleting a directory of two files and making another one costs a journal about as much as all the
rest of a small commit. So the directory of a small checkpoint is only hidden under its temporary
name, and a later commit writes it again and renames it: nothing is allocated, and the fsync of a
file that keeps its length writes the data alone. One rule makes this safe: a directory is written
to only after its parent has been flushed since it was hidden. Before that a power cut could bring
its old name back, with new bytes.

Fences keep an older generation from committing, whenever it wakes up. A process may be stopped
between any two steps of a commit, be replaced, and continue. Two orders exclude that it commits
then:

    the successor                             a commit
    puts up its fence                         makes its temporary names (checkpoint and LATEST)
    removes older temporary names             looks for a newer fence
    reads what is there                       renames both

If a commit looked before the fence was up, then each of its temporary names was there to be
removed, or its rename came before the successor's read.

The order of trust: the highest generation first (a fenced process may have turned LATEST back),
within it the checkpoint that LATEST names, then the steps from new to old.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from muster.checkpoints.errors import CheckpointDamaged, StaleGeneration, checkpoint_errors
from muster.checkpoints.format import Packed
from muster.checkpoints.local import (
    FileSystem,
    LocalFileSystem,
    ensure_directory,
    remove_tree,
    rewrite_file,
    write_file,
)
from muster.checkpoints.manifest import (
    LATEST,
    LATEST_LIMIT_BYTES,
    MANIFEST,
    STATE,
    WITNESS,
    CheckpointName,
    Fence,
    FileFacts,
    Manifest,
    generation_of_temporary,
    latest_line,
    parse_latest,
    revoked,
    sign,
    temporary_latest,
)
from muster.contracts.location import Location
from muster.contracts.settings.paths import rank_of_checkpoints

RECYCLED_LIMIT_BYTES: Final = 1 << 20
"""A larger state is limited by its bytes, and two more copies of it would waste disk space."""


class LocalStore:
    """A `CheckpointStore` in a directory."""

    def __init__(
        self,
        directory: Path,
        warn: Callable[[str], None] = lambda _sentence: None,
        files: FileSystem | None = None,
        writer: str = "",
    ) -> None:
        """`warn` takes sentences for the user about files that cannot be deleted.

        `writer`, 16 hexadecimal digits, is for a store whose caller may go on elsewhere while this
        one still works. A claim then fences all others of its generation as well.
        """
        self.location: Location = directory  # as the user wrote it
        self._directory: Final = str(directory.absolute())
        self._warn: Final = warn
        self._files: Final = files or LocalFileSystem()
        self._writer: Final = writer
        self._generation = -1
        self._job_uid: str | None = None
        self._taken: set[CheckpointName] = set()
        self._recyclable: set[CheckpointName] = set()  # small ones of this process
        self._hidden: list[CheckpointName] = []
        self._ready: list[CheckpointName] = []  # hidden durably: they may be written to

    def latest(self) -> CheckpointName | None:
        """Return the name in LATEST; None if it is missing, unreadable, torn or not ours."""
        try:
            return parse_latest(self._files.read(f"{self._directory}/{LATEST}", LATEST_LIMIT_BYTES))
        except OSError:
            return None

    def names(self) -> list[CheckpointName]:
        return [name for text in self._list() if (name := CheckpointName.parse(text))]

    def by_trust(self) -> Iterator[CheckpointName]:
        latest = self.latest()
        yield from sorted(
            self.names(), key=lambda name: (name.generation, name == latest, name), reverse=True
        )

    def ranks(self) -> list[int]:
        found = self._list()
        return sorted(rank for name in found if (rank := rank_of_checkpoints(name)) is not None)

    def read(self, name: CheckpointName, file: str, limit_bytes: int) -> bytearray:
        path = f"{self._directory}/{name}/{file}"
        try:
            return self._files.read(path, limit_bytes)
        except OSError as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error.strerror or error}") from error

    def claim(self, generation: int | None, job_uid: str | None) -> int:
        """Put up a fence, and remove interrupted saves."""
        self._job_uid = job_uid
        self._generation = -1 if generation is None else generation
        with checkpoint_errors("preparing to save checkpoints in", self._directory):
            ensure_directory(self._files, self._directory)
            if generation is None:
                # A power cut may have removed the fence of a checkpoint.
                saved = (name.generation for name in self.names())
                fences = (fence.generation for fence in self._fences())
                self._generation = max([-1, *saved, *fences]) + 1
            self._refuse_if_stale(has_claimed=False)
            self._put_up_fence()  # also removes our own hidden directories after a failed commit
            self._recyclable, self._hidden, self._ready = set(), [], []
            # Listed now: an older generation may have saved until the fence was up.
            self._taken = set(self.names())
        return self._generation

    def commit(self, unsigned: Manifest, packed: Packed) -> tuple[CheckpointName, Manifest]:
        """Write a complete checkpoint under its final name and into LATEST, durably."""
        name = self._free_name(unsigned.step)
        with checkpoint_errors("saving a checkpoint in", self._directory):
            try:
                manifest = self._commit(name, unsigned, packed)
            except FileNotFoundError:
                # A successor may have removed our temporary names.
                self._refuse_if_stale()
                raise
        self._taken.add(name)
        if _is_recyclable(packed):
            self._recyclable.add(name)
        return name, manifest

    def put_witness(self, name: CheckpointName, content: bytes) -> None:
        """Rename the file into place. Training waits for this, so nothing is flushed."""
        temporary = f"{self._directory}/{temporary_latest(self._generation, self._writer)}"
        target = f"{self._directory}/{name}/{WITNESS}"
        with checkpoint_errors("writing", target):
            descriptor = self._files.create(temporary)
            try:
                self._files.write(descriptor, content)
                self._files.rename(temporary, target)
            except OSError:
                self._remove(temporary)
                raise
            finally:
                self._files.close(descriptor)

    def rewind(self, name: CheckpointName) -> None:
        latest = f"{self._directory}/{temporary_latest(self._generation, self._writer)}"
        with checkpoint_errors("going back in", self._directory):
            write_file(self._files, latest, [memoryview(latest_line(name))])
            self._refuse_if_stale()  # as in `_publish`
            self._rename(latest, LATEST)

    def remove(self, name: CheckpointName) -> None:
        """Delete or recycle a checkpoint, which first gets a temporary name in one step."""
        path, temporary = f"{self._directory}/{name}", self._temporary(name)
        with checkpoint_errors("deleting", path), suppress(FileNotFoundError):
            self._files.rename(path, temporary)
            if name in self._recyclable and not self._hidden:
                with suppress(FileNotFoundError):
                    self._files.remove_file(f"{temporary}/{WITNESS}")
                self._hidden.append(name)  # at rest one is hidden and one is ready
            else:
                self._remove(temporary)
        self._taken.discard(name)
        self._recyclable.discard(name)

    def close(self) -> None:
        for name in self._hidden + self._ready:
            self._remove(self._temporary(name))
        self._hidden, self._ready = [], []

    def _list(self) -> list[str]:
        """Return the names of the directory's entries; none if there is no directory."""
        with checkpoint_errors("listing", self._directory):
            try:
                return self._files.list_directory(self._directory)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def _free_name(self, step: int) -> CheckpointName:
        """Return a name for a new checkpoint of `step`."""
        name = CheckpointName(self._generation, step)
        while name in self._taken or name in self._hidden or name in self._ready:
            name = name._replace(revision=name.revision + 1)
        return name

    def _put_up_fence(self) -> None:
        """Exclude older generations: none of them commits once this has returned.

        A fence need not survive a power cut: the process that it stops does not either.
        """
        own = self._own_fence()
        with suppress(FileExistsError):
            self._files.close(self._files.create(f"{self._directory}/{own}"))
        for fence in self._fences():
            if own.replaces(fence):
                self._remove(f"{self._directory}/{fence}")
        for name in self._files.list_directory(self._directory):
            left_by = generation_of_temporary(name)
            if left_by is None or left_by > self._generation:
                continue
            path, gone = (f"{self._directory}/{entry}" for entry in (name, revoked(name)))
            if path != gone:
                # First renamed in one step, so that its writer cannot rename it, should it wake
                # up: a directory emptied file by file might be filled meanwhile.
                with suppress(FileNotFoundError):
                    self._files.rename(path, gone)
            self._remove(gone)

    def _refuse_if_stale(self, *, has_claimed: bool = True) -> None:
        """Raise `StaleGeneration` if a newer claim has put up its fence, and removed ours."""
        fences = self._fences()
        newest = max([-1, *(fence.generation for fence in fences)])
        is_replaced = has_claimed and self._writer and self._own_fence() not in fences
        if newest > self._generation or is_replaced:
            raise StaleGeneration(self._directory, self._generation, newest)

    def _own_fence(self) -> Fence:
        return Fence.of(self._generation, self._job_uid, self._writer)

    def _temporary(self, name: CheckpointName) -> str:
        return f"{self._directory}/{name.temporary(self._writer)}"

    def _fences(self) -> list[Fence]:
        """Return this job's fences; those of every job for a process started by hand."""
        job = Fence.of(0, self._job_uid).job
        found = map(Fence.parse, self._files.list_directory(self._directory))
        return [fence for fence in found if fence and (self._job_uid is None or fence.job == job)]

    def _commit(self, name: CheckpointName, unsigned: Manifest, packed: Packed) -> Manifest:
        recycled = self._ready.pop() if self._ready and _is_recyclable(packed) else None
        temporary = self._temporary(recycled or name)
        latest = f"{self._directory}/{temporary_latest(name.generation, self._writer)}"
        if not recycled:
            self._files.make_directory(temporary)
        try:
            manifest = self._fill(temporary, recycled, unsigned, packed)
            write_file(self._files, latest, [memoryview(latest_line(name))])
            self._publish(name, temporary, latest)
        except BaseException:
            with suppress(OSError):
                remove_tree(self._files, temporary)
            raise
        return manifest

    def _publish(self, name: CheckpointName, temporary: str, latest: str) -> None:
        """Rename the checkpoint and LATEST; on an error remove the temporary LATEST."""
        try:
            # Both temporary names exist: a fence that goes up after this check removes both.
            self._refuse_if_stale()
            self._rename(temporary, str(name))
            self._ready, self._hidden = self._ready + self._hidden, []
            self._rename(latest, LATEST)
        except BaseException:
            with suppress(OSError):
                self._files.remove_file(latest)
            raise

    def _fill(
        self, temporary: str, recycled: CheckpointName | None, unsigned: Manifest, packed: Packed
    ) -> Manifest:
        """Write both files into a new or a recycled directory."""

        def write(file: str, buffers: Iterable[memoryview], size_bytes: int) -> FileFacts:
            path = f"{temporary}/{file}"
            if recycled:
                return rewrite_file(self._files, path, buffers, size_bytes)
            return write_file(self._files, path, buffers)

        facts = {}
        if packed.size_bytes:
            facts[STATE] = write(STATE, packed.buffers, packed.size_bytes)
        manifest, content = sign(msgspec.structs.replace(unsigned, files=facts))
        write(MANIFEST, [memoryview(content)], len(content))
        if not recycled:
            self._files.fsync_directory(temporary)
        return manifest

    def _rename(self, temporary: str, name: str) -> None:
        self._files.rename(temporary, f"{self._directory}/{name}")
        self._files.fsync_directory(self._directory)

    def _remove(self, path: str) -> None:
        try:
            if self._files.is_directory(path):
                remove_tree(self._files, path)
            else:
                self._files.remove_file(path)
        except FileNotFoundError:
            return  # our successor did it
        except OSError as error:
            self._warn(f"{path} is unused and cannot be deleted: {error.strerror or error}")


def _is_recyclable(packed: Packed) -> bool:
    """Return whether a save writes both files of a directory, and few bytes."""
    return 0 < packed.size_bytes <= RECYCLED_LIMIT_BYTES
