"""The checkpoints of one rank: what is saved when, which are kept, and which can be continued.

How they become durable, and how older generations are fenced, is up to the `CheckpointStore`. A
checkpoint is acknowledged once `save` has returned.
"""

import math
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import msgspec
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.errors import CheckpointDamaged, CheckpointError, RestoreDamaged
from muster.checkpoints.format import Packed, State, pack
from muster.checkpoints.manifest import (
    BEST,
    MANIFEST_LIMIT_BYTES,
    WITNESS,
    CheckpointName,
    Manifest,
    Owner,
    RestorePoint,
)
from muster.checkpoints.reader import Checkpoint, CheckpointReader
from muster.checkpoints.store import CheckpointStore, StoreOpener, manifest_of, open_store
from muster.contracts.location import parse_location
from muster.contracts.messages.storage import OpenCheckpoints
from muster.contracts.shards import Position

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


class _WitnessFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A witness as it is stored: a crash may have torn it, and a recycled directory keeps none."""

    checkpoint: str
    xxh3: str  # of the rest
    witness: msgspec.Raw


class CheckpointManager:
    """One rank's directory of checkpoints. For one thread of one process."""

    def __init__(
        self,
        *,
        store: CheckpointStore,
        owner: Owner,
        keep_last: int,
        clock: Callable[[], datetime],
        warn: Callable[[str], None],
        inherited: CheckpointStore | None = None,
        reports_cost: bool = True,
    ) -> None:
        """`clock` returns the time in UTC; `warn` takes sentences for the user.

        A job without checkpoints begins with those of the last job in `inherited`.
        `keep_last` counts the newest one: 1 keeps nothing to fall back to.
        """
        if keep_last < 1:
            raise ValueError(f"keep_last counts the newest checkpoint too, got {keep_last}")
        self._store: Final = store
        self._owner: Final = owner
        self._keep_last: Final = keep_last
        self._clock: Final = clock
        self._warn: Final = warn
        self._reader: Final = CheckpointReader(
            store=store,
            rank=owner.rank,
            world_size=None if owner.any_world_size else owner.world_size,
            warn=warn,
        )
        self._inherited: Final = inherited
        self._generation = owner.generation
        # For one rank: the others would warn of the same.
        self._cost = SaveCost() if reports_cost and owner.rank == 0 else None
        self._claimed: int | None = None
        self._own: set[CheckpointName] | None = None
        """This job's checkpoints; None until the first save after a claim has listed them."""
        self._trusted: set[CheckpointName] = set()
        self._marked: dict[CheckpointName, float] = {}
        """Those of `_own` that were the best when they were saved; the newest of them still is."""

    def claim(self) -> int:
        """Fence older generations, of which none commits from now on; return this one's number.

        Call it before `restore`, or an older process may still save a newer checkpoint; otherwise
        the first save does it. Raises as `save`.
        """
        if self._claimed is None:
            self._generation = self._store.claim(self._generation, self._owner.job_uid)
            self._own = None
            if self._owner.restore_from is not None:
                self._delete_newer(self._owner.restore_from)
            self._claimed = self._generation
        return self._claimed

    def best(self) -> float | None:
        """Return the metric of this job's best checkpoint, None without one; raises as `save`."""
        self._list_own(self.claim())
        return self._marked[max(self._marked)] if self._marked else None

    def restore(self) -> Checkpoint | None:
        """Return the newest intact checkpoint of this job or what it inherits; None without any.

        Every byte is verified, and skipped checkpoints are reported to `warn`. A rank of a gang
        gets the one from which all go on, or None if it saves none. Raises `RestoreDamaged`,
        `CheckpointDamaged` if there are checkpoints and none is intact, `CheckpointMismatch` if
        the newest is of another rank or world size, and `CheckpointNotWritable` or
        `CheckpointFailed` if the directory cannot be read.
        """
        if self._owner.restore_from is not None:
            return self._restore(self._owner.restore_from)
        checkpoint = self._reader.newest(self._owner.owns)
        if checkpoint is not None:
            self._trusted.add(checkpoint.name)
        elif self._inherited is not None:
            earlier = replace(self._reader, store=self._inherited)
            return earlier.newest_of_last_job(self._owner.inherited_step)
        return checkpoint

    def save(
        self,
        step: int,
        position: Position,
        state: State | Packed,
        on_saved: Callable[[int], None] = lambda _bytes: None,
    ) -> Manifest:
        """Save a checkpoint; once this returns, no crash and no power cut can lose it.

        `on_saved` is called with the bytes of its arrays.
        Raises `UnsupportedState`, `StaleGeneration`, `CheckpointNotWritable` or
        `CheckpointFailed`; older checkpoints are untouched then. A failure to delete old
        checkpoints is reported to `warn`: the new one is safe by then.
        """
        if step < 0:
            raise ValueError(f"steps count from 0, got {step}")
        began = time.monotonic()
        saved_at = self._clock().isoformat(timespec="milliseconds").replace("+00:00", "Z")
        packed = state if isinstance(state, Packed) else pack(state)
        generation = self.claim()
        self._claimed = None  # a save that fails claims again
        unsigned = Manifest(
            step=step,
            time=saved_at,
            rank=self._owner.rank,
            world_size=self._owner.world_size,
            job_id=self._owner.job_id,
            job_uid=self._owner.job_uid,
            generation=generation,
            position=position,
            values=packed.values,
            files={},
        )
        name, manifest = self._store.commit(unsigned, packed)
        self._claimed = generation
        self._trusted.add(name)
        if BEST in packed.values:
            self._marked[name] = packed.values[BEST]
        self._retire(name)
        if self._cost and (warning := self._cost.warning(step, began, time.monotonic())):
            self._cost = None  # one warning is enough
            self._warn(warning)
        on_saved(packed.size_bytes)
        return manifest

    def put_witness(self, witness: bytes) -> None:
        """Write a JSON value beside the newest checkpoint; raises as `save`.

        One that a successor has saved is left alone.
        """
        name = self._store.latest()
        if name is not None and name.generation <= (self._generation or 0):
            file = _WitnessFile(str(name), xxh3_64_hexdigest(witness), msgspec.Raw(witness))
            self._store.put_witness(name, msgspec.json.encode(file))

    def witness(self) -> bytes:
        """Return what was written beside the newest checkpoint; nothing if that is not whole."""
        name = self._store.latest()
        with suppress(CheckpointDamaged, msgspec.MsgspecError, RecursionError):
            content = self._store.read(name, WITNESS, MANIFEST_LIMIT_BYTES) if name else b""
            file = msgspec.json.decode(content, type=_WitnessFile)
            if (file.checkpoint, file.xxh3) == (str(name), xxh3_64_hexdigest(file.witness)):
                return bytes(file.witness)
        return b""

    def flush(self) -> None:
        """Do nothing: a checkpoint is durable when `save` has returned."""

    def close(self) -> None:
        """Let the store tidy up; a later save claims again."""
        self._claimed = None
        self._store.close()

    def _restore(self, point: RestorePoint) -> Checkpoint | None:
        store = self._inherited if point.is_inherited else self._store
        if point.name is None or store is None or not point.is_for(self._owner.rank):
            return None
        try:
            checkpoint = replace(self._reader, store=store).named(point.name)
        except CheckpointDamaged as damage:
            raise RestoreDamaged(f"{damage}: all ranks resume from an older one") from damage
        if not point.is_inherited:
            self._trusted.add(point.name)
        return checkpoint

    def _delete_newer(self, point: RestorePoint) -> None:
        """Delete what was saved after the point from which this gang resumes.

        Another rank does not have it, and it would count as one of those to keep. A job that
        resumes under its own id deletes what the earlier job of that id has saved after the point;
        checkpoints of other places stay.
        """
        if point.name is None or not point.is_for(self._owner.rank):
            return
        store, inherited = self._store, self._inherited
        if point.is_inherited and (inherited is None or inherited.location != store.location):
            return
        with suppress(CheckpointDamaged):  # `restore` reports it
            uid = manifest_of(store, point.name).job_uid
            newer = [name for name in self._names_of(uid) if name > point.name]
            if store.latest() in newer:
                store.rewind(point.name)
            for name in sorted(newer, reverse=True):
                store.remove(name)

    def _names_of(self, uid: str | None) -> list[CheckpointName]:
        """Return what earlier attempts of a job have saved; nothing that is damaged."""
        names = []
        for name in self._store.names():
            if uid == self._owner.job_uid and name.generation >= (self._generation or 0):
                continue  # a restarted storage process claims again
            with suppress(CheckpointDamaged):
                if manifest_of(self._store, name).job_uid == uid:
                    names.append(name)
        return names

    def _retire(self, latest: CheckpointName) -> None:
        """Remove old checkpoints, never another job's or damaged ones."""
        try:
            own = self._list_own(latest.generation)
            own.add(latest)
            best = max(self._marked, default=None)
            for name in expendable(own, latest, self._trusted, self._keep_last):
                if name == best:
                    continue
                own.discard(name)
                self._trusted.discard(name)
                self._marked.pop(name, None)
                self._store.remove(name)
        except CheckpointError as error:
            self._warn(f"an old checkpoint stays: {error}")

    def _list_own(self, generation: int) -> set[CheckpointName]:
        if self._own is None:
            self._marked = {}
            # A successor may have saved since our commit: its checkpoints are not ours.
            names = [name for name in self._store.names() if name.generation <= generation]
            self._own = set(filter(self._is_own, names))
        return self._own

    def _is_own(self, name: CheckpointName) -> bool:
        try:
            manifest = manifest_of(self._store, name)
        except CheckpointDamaged:
            return False  # its owner is unknown
        is_own = self._owner.owns(manifest)
        if is_own and BEST in manifest.values:
            self._marked[name] = manifest.values[BEST]
        return is_own


def open_manager(
    session: OpenCheckpoints,
    warn: Callable[[str], None],
    open_at: StoreOpener = open_store,
    *,
    reports_cost: bool = True,
) -> CheckpointManager:
    """Return the manager of a rank's checkpoints; `warn` takes sentences for the user."""

    def store_at(text: str) -> CheckpointStore:
        return open_at(parse_location(text), warn)

    return CheckpointManager(
        store=store_at(session.location),
        owner=Owner(
            job_id=session.job_id,
            job_uid=session.job_uid,
            rank=session.rank,
            world_size=session.world_size,
            generation=session.generation,
            any_world_size=session.any_world_size,
            restore_from=RestorePoint.parse(session.restore_from) if session.restore_from else None,
            inherited_step=session.inherited_step,
        ),
        keep_last=session.keep_last,
        clock=lambda: datetime.now(UTC),
        warn=warn,
        inherited=None if session.inherited is None else store_at(session.inherited),
        reports_cost=reports_cost,
    )
