"""The checkpoints of one rank: saved durably, restored verified, fenced by generation.

A save is a fixed order of durable steps. Each makes the next one safe, and a power cut between any
two leaves intact what LATEST names:

    write state and manifest into a temporary directory, fsync each   what will be named is whole
    fsync the temporary directory                                     and complete
    write the next LATEST into a temporary file, fsync                so is what will name it
    look for a newer fence                                            no successor has replaced us
    rename it to its final name, fsync the rank's directory           it exists
    replace LATEST, fsync the rank's directory                        it is found: acknowledged
    rename older ones to temporary names and delete them              nothing depends on them

A checkpoint is acknowledged once `save` has returned. A small one is written into a recycled
directory if there is one, whose entries are durable already.

Fences keep an older generation from committing, whenever it wakes up. A process may be stopped
between any two steps of a save, be replaced, and continue. Two orders exclude that it commits then:

    the successor                             a save
    puts up its fence                         makes its temporary names (checkpoint and LATEST)
    removes older temporary names             looks for a newer fence
    reads what is there                       renames both

If a save looked before the fence was up, then each of its temporary names was there to be removed,
or its rename came before the successor's read.
"""

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from muster.checkpoints.errors import CheckpointDamaged, StaleGeneration, checkpoint_errors
from muster.checkpoints.format import Packed, State, pack
from muster.checkpoints.local import (
    FileSystem,
    ensure_directory,
    remove_tree,
    rewrite_file,
    write_file,
)
from muster.checkpoints.manifest import (
    LATEST,
    MANIFEST,
    STATE,
    CheckpointName,
    Fence,
    Manifest,
    Owner,
    generation_of_temporary,
    latest_line,
    revoked,
    sign,
    temporary_latest,
)
from muster.checkpoints.reader import Checkpoint, CheckpointReader
from muster.contracts.shards import Position

RECYCLED_LIMIT_BYTES: Final = 1 << 20
"""A larger state is limited by its bytes, and two more copies of it would waste disk space."""

COST_SECONDS: Final = 10.0
"""How long it is measured what part of the time saving takes, before a warning."""

COST_WANTED: Final = 0.1


def expendable(
    names: AbstractSet[CheckpointName],
    latest: CheckpointName,
    trusted: AbstractSet[CheckpointName],
    keep_last: int,
) -> list[CheckpointName]:
    """Return the checkpoints to delete once `latest` is durable, newest first.

    `latest` and the newest others stay, `keep_last` in all. With two or more to keep, one of the
    others must be `trusted` (written or verified by this process), and everything newer than it
    stays too: a series of damaged directories must not push the last good one out.
    """
    others = sorted(names - {latest}, reverse=True)
    surplus = others[keep_last - 1 :]
    if keep_last == 1:
        return surplus
    fallback = next((name for name in others if name in trusted), None)
    return [name for name in surplus if fallback and name < fallback]


class RecycledDirs:
    """The directories of deleted small checkpoints, kept to be written again.

    Deleting a directory of two files and making another one costs a journal about as much as all
    the rest of a small save. So a deleted one is hidden under its temporary name, and a later save
    fills it and renames it: nothing is allocated, and the fsync of a file that keeps its length
    writes the data alone.

    One rule makes this safe: a directory is written to only after its parent has been flushed
    since it was hidden. Before that a power cut could bring its old name back, with new bytes.
    """

    def __init__(self) -> None:
        self._hidden: list[CheckpointName] = []
        self._ready: list[CheckpointName] = []

    def __contains__(self, name: CheckpointName) -> bool:
        return name in self._hidden or name in self._ready

    @property
    def wanted(self) -> bool:
        """True if another one would be used: at rest one is hidden and one is ready."""
        return not self._hidden

    def hide(self, name: CheckpointName) -> None:
        """Add a directory that has its temporary name now, though not durably."""
        self._hidden.append(name)

    def mark_flushed(self) -> None:
        """Record that the parent was flushed: the hidden directories stay hidden."""
        self._ready += self._hidden
        self._hidden.clear()

    def take(self) -> CheckpointName | None:
        """Return one that may be written to, or None."""
        return self._ready.pop() if self._ready else None

    def clear(self) -> list[CheckpointName]:
        """Forget all of them and return them for deletion."""
        rest = self._hidden + self._ready
        self._hidden.clear()
        self._ready.clear()
        return rest


class SaveCost:
    """What part of the time goes into saving, from the end of the first save on."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        self._saves = 0
        self._seconds = 0.0

    def warning(self, step: int, began: float, ended: float) -> str | None:
        """Add a save, timed by a monotonic clock; return a sentence if it costs much."""
        if self._first is None:
            self._first = step, ended
            return None
        self._saves += 1
        self._seconds += ended - began
        steps, seconds = step - self._first[0], ended - self._first[1]
        if seconds < COST_SECONDS or steps < 1 or self._seconds <= COST_WANTED * seconds:
            return None
        # With `every` steps between saves their cost is saving / (saving + stepping).
        every, stepping_seconds = steps / self._saves, max(seconds - self._seconds, 1e-6)
        wanted = math.ceil(every * (1 / COST_WANTED - 1) * self._seconds / stepping_seconds)
        return (
            f"spends {self._seconds / seconds:.0%} of its time on saving "
            f"({self._seconds / self._saves * 1000:.3g} ms every {every:.3g} steps): "
            f"checkpoint_every {wanted} makes it {COST_WANTED:.0%}"
        )


@dataclass(slots=True, kw_only=True)
class _Inventory:
    """What this process knows of the directory; discarded after any failure."""

    generation: int
    own: set[CheckpointName]  # this job's checkpoints
    others: frozenset[CheckpointName]
    """Names of another job's checkpoints, and of damaged ones: never touched."""
    recyclable: set[CheckpointName] = field(default_factory=set)
    """Small ones of this process, with both files."""
    recycled: RecycledDirs = field(default_factory=RecycledDirs)

    def free_name(self, step: int) -> CheckpointName:
        """Return a name for a new checkpoint of `step`."""
        name = CheckpointName(self.generation, step)
        while name in self.own or name in self.others or name in self.recycled:
            name = name._replace(revision=name.revision + 1)
        return name


class CheckpointManager:
    """One rank's directory of checkpoints. For one thread of one process."""

    def __init__(  # noqa: PLR0913
        self,
        *,
        files: FileSystem,
        directory: Path,
        owner: Owner,
        keep_last: int,
        clock: Callable[[], datetime],
        warn: Callable[[str], None],
        inherited: Path | None = None,
        any_world_size: bool = False,
        reports_cost: bool = True,
    ) -> None:
        """`clock` returns the time in UTC; `warn` takes sentences for the user.

        A job without checkpoints begins with those of the last job in `inherited`.
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
        self._reader: Final = CheckpointReader(
            files=files,
            directory=directory.absolute(),
            rank=owner.rank,
            world_size=None if any_world_size else owner.world_size,
            warn=warn,
        )
        self._inherited: Final = inherited
        self._generation = -1 if owner.generation is None else owner.generation
        # For one rank: the others would warn of the same.
        self._cost = SaveCost() if reports_cost and owner.rank == 0 else None
        self._inventory: _Inventory | None = None
        self._trusted: set[CheckpointName] = set()

    def claim(self) -> None:
        """Fence older generations: once this returns, none of them commits here.

        Call it before `restore`, or an older process may still save a newer checkpoint; otherwise
        the first save does it. Raises as `save`.
        """
        if self._inventory is None:
            with checkpoint_errors("preparing to save checkpoints in", self._directory):
                self._inventory = self._open()

    def restore(self) -> Checkpoint | None:
        """Return the newest intact checkpoint of this job or what it inherits; None without any.

        Every byte is verified, and skipped checkpoints are reported to `warn`. Raises
        `CheckpointDamaged` if there are checkpoints and none is intact, `CheckpointMismatch` if
        the newest is of another rank or world size, and `CheckpointNotWritable` or
        `CheckpointFailed` if the directory cannot be read.
        """
        checkpoint = self._reader.newest(self._owner.owns)
        if checkpoint is not None:
            self._trusted.add(checkpoint.name)
        elif self._inherited is not None:
            return replace(self._reader, directory=self._inherited).newest_of_last_job()
        return checkpoint

    def save(
        self,
        step: int,
        position: Position,
        state: State | Packed,
        on_saved: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Save a checkpoint; once this returns, no crash and no power cut can lose it.

        Raises `UnsupportedState`, `StaleGeneration`, `CheckpointNotWritable` or
        `CheckpointFailed`; older checkpoints are untouched then. A failure to delete old
        checkpoints is reported to `warn`: the new one is safe by then.
        """
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        began = time.monotonic()
        saved_at = self._clock().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        packed = state if isinstance(state, Packed) else pack(state)
        inventory, self._inventory = self._inventory, None
        with checkpoint_errors("saving a checkpoint in", self._directory):
            if inventory is None:
                inventory = self._open()
            name = inventory.free_name(step)
            unsigned = Manifest(
                step=name.step,
                time=saved_at,
                rank=self._owner.rank,
                world_size=self._owner.world_size,
                job_id=self._owner.job_id,
                job_uid=self._owner.job_uid,
                generation=name.generation,
                position=position,
                values=packed.values,
                files={},
            )
            try:
                manifest = self._commit(inventory, name, unsigned, packed)
            except FileNotFoundError:
                # A successor may have removed our temporary names.
                self._refuse_if_stale(self._newest_generation())
                raise
        inventory.own.add(name)
        if _is_recyclable(packed):
            inventory.recyclable.add(name)
        self._trusted.add(name)
        # The next save relies on the inventory only if this one succeeded.
        self._inventory = inventory
        self._retire(inventory, name)
        if self._cost and (warning := self._cost.warning(step, began, time.monotonic())):
            self._cost = None  # one warning is enough
            self._warn(warning)
        on_saved()
        return manifest

    def flush(self) -> None:
        """Do nothing: a checkpoint is durable when `save` has returned."""

    def close(self) -> None:
        """Delete the recycled directories; a later save starts without any."""
        if self._inventory is not None:
            for name in self._inventory.recycled.clear():
                self._remove(f"{self._directory}/{name.temporary}")

    def _open(self) -> _Inventory:
        """Put up a fence, remove interrupted saves, and read what is there."""
        ensure_directory(self._files, self._directory)
        own, _ = self._taken_names()
        newest = self._newest_generation(own)
        if self._owner.generation is None and self._generation < 0:
            self._generation = newest + 1
        self._refuse_if_stale(newest)
        self._put_up_fence()  # also removes what interrupted saves have left
        # Read again: an older generation may have saved until the fence was up.
        own, others = self._taken_names()
        return _Inventory(generation=self._generation, own=own, others=others)

    def _put_up_fence(self) -> None:
        """Exclude older generations: none of them commits once this has returned.

        A fence need not survive a power cut: the process that it stops does not either.
        """
        own = Fence.of(self._generation, self._owner.job_uid)
        with suppress(FileExistsError):
            self._files.close(self._files.create(f"{self._directory}/{own}"))
        for fence in self._fences():
            if fence < own:
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

    def _newest_generation(self, names: Iterable[CheckpointName] = ()) -> int:
        """Return the newest generation of the fences and of `names`; -1 if there is none."""
        generations = [each.generation for each in self._fences()]
        return max([-1, *generations, *(name.generation for name in names)])

    def _refuse_if_stale(self, newest: int) -> None:
        """Raise `StaleGeneration` if `newest` is above this process's generation."""
        if newest > self._generation:
            raise StaleGeneration(self._directory, self._generation, newest)

    def _fences(self) -> list[Fence]:
        """Return this job's fences; those of every job for a process started by hand."""
        uid = self._owner.job_uid
        job = Fence.of(0, uid).job
        found = map(Fence.parse, self._files.list_directory(self._directory))
        return [fence for fence in found if fence and (uid is None or fence.job == job)]

    def _taken_names(self) -> tuple[set[CheckpointName], frozenset[CheckpointName]]:
        """Return the names of this job's checkpoints, and of all others."""
        names = set(self._reader.names())
        own = {name for name in names if self._is_own(name)}
        return own, frozenset(names - own)

    def _is_own(self, name: CheckpointName) -> bool:
        try:
            return self._owner.owns(self._reader.manifest(name))
        except CheckpointDamaged:
            return False  # its owner is unknown, so it neither fences us nor is deleted

    def _commit(
        self, inventory: _Inventory, name: CheckpointName, unsigned: Manifest, packed: Packed
    ) -> Manifest:
        """Write a complete checkpoint under its final name and into LATEST, durably."""
        recycled = inventory.recycled.take() if _is_recyclable(packed) else None
        temporary = f"{self._directory}/{(recycled or name).temporary}"
        latest = f"{self._directory}/{temporary_latest(name.generation)}"
        if not recycled:
            self._files.make_directory(temporary)
        try:
            manifest = self._fill(temporary, recycled, unsigned, packed)
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
        """Rename the checkpoint and LATEST; on an error remove the temporary LATEST."""
        try:
            # Both temporary names exist: a fence that goes up after this check removes both.
            self._refuse_if_stale(self._newest_generation())
            self._rename(temporary, str(name))
            inventory.recycled.mark_flushed()
            self._rename(latest, LATEST)
        except BaseException:
            with suppress(OSError):
                self._files.remove_file(latest)
            raise

    def _fill(
        self, temporary: str, recycled: CheckpointName | None, unsigned: Manifest, packed: Packed
    ) -> Manifest:
        """Write both files into a new or a recycled directory."""
        write = rewrite_file if recycled else write_file
        facts = {}
        if packed.buffers:
            facts[STATE] = write(self._files, f"{temporary}/{STATE}", packed.buffers)
        manifest, content = sign(msgspec.structs.replace(unsigned, files=facts))
        write(self._files, f"{temporary}/{MANIFEST}", [memoryview(content)])
        if not recycled:
            self._files.fsync_directory(temporary)
        return manifest

    def _rename(self, temporary: str, name: str) -> None:
        self._files.rename(temporary, f"{self._directory}/{name}")
        self._files.fsync_directory(self._directory)

    def _retire(self, inventory: _Inventory, latest: CheckpointName) -> None:
        """Delete or recycle old checkpoints; readers never see an incomplete one."""
        for name in expendable(inventory.own, latest, self._trusted, self._keep_last):
            inventory.own.discard(name)
            self._trusted.discard(name)
            temporary = f"{self._directory}/{name.temporary}"
            try:
                self._files.rename(f"{self._directory}/{name}", temporary)
            except FileNotFoundError:
                continue  # our predecessor or our successor did it
            except OSError as error:
                self._warn(f"{self._directory}/{name} cannot be deleted: {error.strerror or error}")
                continue
            if name in inventory.recyclable and inventory.recycled.wanted:
                inventory.recycled.hide(name)
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
            return  # our successor did it
        except OSError as error:
            self._warn(f"{path} is unused and cannot be deleted: {error.strerror or error}")


def _is_recyclable(packed: Packed) -> bool:
    """Return whether a save writes both files of a directory, and few bytes."""
    return 0 < packed.size_bytes <= RECYCLED_LIMIT_BYTES
