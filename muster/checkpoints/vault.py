"""The checkpoints of one rank: saved durably, restored verified, fenced by generation.

A save is a fixed order of durable steps. Each one makes the next one safe, and a power cut between
any two leaves what LATEST names intact:

    state and manifest into a temporary directory, each flushed   what will be named is whole
    the temporary directory flushed                               and complete
    the next LATEST into a temporary file, flushed                so is what will name it
    a look for a newer fence                                      nobody has replaced us
    renamed to its final name, the rank's directory flushed       it exists
    LATEST replaced, the rank's directory flushed                 it is found: acknowledged
    older ones renamed to temporary names and deleted             nothing depends on them

Acknowledged means: `save` returned. A small one goes into a spare directory where there is one,
whose entries are durable already.

Older generations are kept from committing by a fence (`fences`).
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from muster.checkpoints.durable import (
    ensure_directory,
    remove_tree,
    rewrite_file,
    write_file,
)
from muster.checkpoints.errors import CheckpointDamaged, StaleGeneration, mapped
from muster.checkpoints.fences import Fences
from muster.checkpoints.filesystem import FileSystem
from muster.checkpoints.manifest import Manifest, sign
from muster.checkpoints.names import (
    LATEST,
    MANIFEST,
    STATE,
    CheckpointName,
    latest_line,
    temporary_latest,
)
from muster.checkpoints.owner import Owner
from muster.checkpoints.reader import Checkpoint, Reader
from muster.checkpoints.retention import expendable
from muster.checkpoints.spares import RECYCLED_LIMIT_BYTES, Spares
from muster.checkpoints.state import Packed, State, pack
from muster.contracts.position import Position


@dataclass(slots=True, kw_only=True)
class _Inventory:
    """What this process knows of the directory since its first save; lost after any failure."""

    generation: int
    own: set[CheckpointName]
    """This job's checkpoints."""
    others: frozenset[CheckpointName]
    """Names taken by another job's checkpoints, or by damaged ones: never touched."""
    recyclable: set[CheckpointName] = field(default_factory=set)
    """Small ones of this process, with both files."""
    spares: Spares = field(default_factory=Spares)

    def free_name(self, step: int) -> CheckpointName:
        """Return a name for a new checkpoint of `step`."""
        name = CheckpointName(self.generation, step)
        while name in self.own or name in self.others or name in self.spares:
            name = name._replace(revision=name.revision + 1)
        return name


class Vault:
    """One rank's directory of checkpoints. For one thread of one process."""

    def __init__(
        self,
        *,
        files: FileSystem,
        directory: Path,
        owner: Owner,
        keep_last: int,
        clock: Callable[[], datetime],
        warn: Callable[[str], None],
    ) -> None:
        """`clock` returns the time in UTC; `warn` takes sentences for a person.

        `keep_last` counts the newest one: 1 keeps nothing to fall back to.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last counts the newest checkpoint too, got {keep_last}")
        self._files: Final = files
        self._directory: Final = str(directory.absolute())
        self._owner: Final = owner
        self._keep_last: Final = keep_last
        self._clock: Final = clock
        self._warn: Final = warn
        self._reader: Final = Reader(
            files=files,
            directory=directory.absolute(),
            rank=owner.rank,
            world_size=owner.world_size,
            warn=warn,
        )
        self._fences: Final = Fences(files, self._directory, owner.job_uid, self._remove)
        self._generation = -1 if owner.generation is None else owner.generation
        self._inventory: _Inventory | None = None
        self._trusted: set[CheckpointName] = set()

    def claim(self) -> None:
        """Fence older generations: once this returns, none of them commits here any more.

        To be done before `restore`, or what was restored may not be the newest for long; a save
        does it otherwise. Raises as `save`.
        """
        if self._inventory is None:
            with mapped("preparing to save checkpoints in", self._directory):
                self._inventory = self._open()

    def restore(self) -> Checkpoint | None:
        """Return the newest intact checkpoint of this job, or None if it has none.

        Every byte is verified. What had to be passed over goes to `warn`. Raises
        `CheckpointDamaged` if there are checkpoints and none is intact, `CheckpointMismatch` if
        the newest is another rank's or of another world size, and `CheckpointNotWritable` or
        `CheckpointFailed` if the directory cannot be read.
        """
        checkpoint = self._reader.newest(self._owner.owns)
        if checkpoint is not None:
            self._trusted.add(checkpoint.name)
        return checkpoint

    def save(self, step: int, position: Position, state: State) -> Manifest:
        """Make a checkpoint durable; when this returns, no crash and no power cut can lose it.

        Raises `UnsupportedState`, `StaleGeneration`, `CheckpointNotWritable` or
        `CheckpointFailed`, and every older checkpoint is then as it was.
        Trouble with the deletion of old ones goes to `warn`: the checkpoint is safe by then.
        """
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        time = self._clock().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        packed = pack(state)
        inventory, self._inventory = self._inventory, None
        with mapped("saving a checkpoint in", self._directory):
            if inventory is None:
                inventory = self._open()
            name = inventory.free_name(step)
            draft = self._draft(name, time, position, packed)
            try:
                manifest = self._commit(inventory, name, draft, packed)
            except FileNotFoundError:
                # Perhaps a successor has taken away what we were about to rename.
                self._fences.refuse_if_stale(self._generation)
                raise
        inventory.own.add(name)
        if _fits_a_spare(packed):
            inventory.recyclable.add(name)
        self._trusted.add(name)
        # Only a save that went through leaves its knowledge to the next one.
        self._inventory = inventory
        self._retire(inventory, name)
        return manifest

    def close(self) -> None:
        """Delete the spare directories; a save after this begins with none."""
        if self._inventory is not None:
            for name in self._inventory.spares.empty():
                self._remove(f"{self._directory}/{name.temporary}")

    def _open(self) -> _Inventory:
        """Put up a fence, clear dead saves, and learn what is there."""
        ensure_directory(self._files, self._directory)
        own, _ = self._taken_names()
        newest = max([self._fences.newest(), *(name.generation for name in own)])
        if self._owner.generation is None and self._generation < 0:
            self._generation = newest + 1
        if newest > self._generation:
            raise StaleGeneration(self._directory, self._generation, newest)
        # What saves and deletions that were cut short have left goes, too.
        self._fences.put_up(self._generation)
        # Looked at again: an older generation may have saved until just now.
        own, others = self._taken_names()
        return _Inventory(generation=self._generation, own=own, others=others)

    def _taken_names(self) -> tuple[set[CheckpointName], frozenset[CheckpointName]]:
        """Return the names of this job's checkpoints, and all others."""
        names = set(self._reader.names())
        own = {name for name in names if self._is_own(name)}
        return own, frozenset(names - own)

    def _is_own(self, name: CheckpointName) -> bool:
        try:
            return self._owner.owns(self._reader.manifest(name))
        except CheckpointDamaged:
            # What cannot be classified is left alone: it neither fences us nor is it deleted.
            return False

    def _draft(
        self, name: CheckpointName, time: str, position: Position, packed: Packed
    ) -> Manifest:
        """Return the manifest of a checkpoint whose files are not written yet."""
        return Manifest(
            step=name.step,
            time=time,
            rank=self._owner.rank,
            world_size=self._owner.world_size,
            job_id=self._owner.job_id,
            job_uid=self._owner.job_uid,
            generation=name.generation,
            position=position,
            values=packed.values,
            files={},
        )

    def _commit(
        self, inventory: _Inventory, name: CheckpointName, draft: Manifest, packed: Packed
    ) -> Manifest:
        """Bring a whole checkpoint into being under its final name and in LATEST, durably."""
        spare = inventory.spares.take() if _fits_a_spare(packed) else None
        temporary = f"{self._directory}/{(spare or name).temporary}"
        latest = f"{self._directory}/{temporary_latest(name.generation)}"
        if not spare:
            self._files.make_directory(temporary)
        try:
            manifest = self._fill(temporary, spare, draft, packed)
            write_file(self._files, latest, [memoryview(latest_line(name))])
            self._publish(inventory, name, temporary, latest)
        except BaseException:
            with suppress(OSError):
                remove_tree(self._files, temporary)
            raise
        return manifest

    def _publish(
        self, inventory: _Inventory, name: CheckpointName, temporary: str, latest: str
    ) -> None:
        """Rename both, which this save has made; what is not renamed of LATEST goes."""
        try:
            # Both temporary names are there: whoever puts up a fence after this takes both away.
            self._fences.refuse_if_stale(self._generation)
            self._rename(temporary, str(name))
            inventory.spares.flushed()
            self._rename(latest, LATEST)
        except BaseException:
            with suppress(OSError):
                self._files.remove_file(latest)
            raise

    def _fill(
        self, temporary: str, spare: CheckpointName | None, draft: Manifest, packed: Packed
    ) -> Manifest:
        """Write both files into a directory that is new, or a spare one."""
        write = rewrite_file if spare else write_file
        facts = {}
        if packed.buffers:
            facts[STATE] = write(self._files, f"{temporary}/{STATE}", packed.buffers)
        manifest, content = sign(msgspec.structs.replace(draft, files=facts))
        write(self._files, f"{temporary}/{MANIFEST}", [memoryview(content)])
        if not spare:
            self._files.fsync_directory(temporary)
        return manifest

    def _rename(self, temporary: str, name: str) -> None:
        self._files.rename(temporary, f"{self._directory}/{name}")
        self._files.fsync_directory(self._directory)

    def _retire(self, inventory: _Inventory, latest: CheckpointName) -> None:
        """Delete or put by what may go, by way of a temporary name: nothing half is ever seen."""
        for name in expendable(inventory.own, latest, self._trusted, self._keep_last):
            inventory.own.discard(name)
            self._trusted.discard(name)
            temporary = f"{self._directory}/{name.temporary}"
            try:
                self._files.rename(f"{self._directory}/{name}", temporary)
            except FileNotFoundError:
                continue  # a process that we have replaced, or that has replaced us, did it
            except OSError as error:
                self._warn(f"{self._directory}/{name} cannot be deleted: {error.strerror or error}")
                continue
            if name in inventory.recyclable and inventory.spares.wanted:
                inventory.spares.hide(name)
            else:
                self._remove(temporary)
            inventory.recyclable.discard(name)

    def _remove(self, path: str) -> None:
        try:
            if self._files.is_directory(path):
                remove_tree(self._files, path)
            else:
                self._files.remove_file(path)
        except FileNotFoundError:
            return  # whoever has replaced us did it
        except OSError as error:
            self._warn(f"{path} is not needed and cannot be deleted: {error.strerror or error}")


def _fits_a_spare(packed: Packed) -> bool:
    """Return whether a save fills both files of a directory, and with little."""
    return 0 < packed.size_bytes <= RECYCLED_LIMIT_BYTES
