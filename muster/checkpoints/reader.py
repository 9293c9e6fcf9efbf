"""Finds the newest intact checkpoint; every byte is verified before it is used.

The store yields checkpoints in the order of trust; only the hashes decide. Reading changes nothing,
and starts again if a running job has meanwhile deleted or recycled what was being read.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from xxhash import xxh3_64_hexdigest

from muster.checkpoints.errors import CheckpointDamaged, CheckpointMismatch
from muster.checkpoints.format import unpack
from muster.checkpoints.manifest import STATE, CheckpointName, Manifest
from muster.checkpoints.store import CheckpointStore, manifest_of
from muster.contracts.job.field_types import StepChoice
from muster.contracts.shards import Position

READ_ATTEMPTS: Final = 100  # before each new attempt the job has saved at least twice


class _Outdated(Exception):
    """The checkpoint being read was deleted meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint; its arrays are writable and belong to the caller."""

    name: CheckpointName
    manifest: Manifest
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def position(self) -> Position:
        return self.manifest.position


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReader:
    """Reads one rank's checkpoints: those of its own job, or of the job it resumes from."""

    store: CheckpointStore
    rank: int
    world_size: int | None  # None accepts any
    warn: Callable[[str], None]
    """Takes sentences for the user: which checkpoints were skipped, and why."""

    def newest(self, is_wanted: Callable[[Manifest], bool] = lambda _: True) -> Checkpoint | None:
        """Return the newest intact checkpoint that is wanted, or None if there is none.

        Raises `CheckpointDamaged` if there are checkpoints and none is intact: starting from the
        beginning would discard work silently. Raises `CheckpointMismatch` if the newest is of
        another rank or world size.
        """
        for _ in range(READ_ATTEMPTS):
            with suppress(_Outdated):
                return self._newest(is_wanted)
        where = self.store.location
        raise CheckpointDamaged(f"{where} changes faster than it can be read: try again")

    def _newest(self, is_wanted: Callable[[Manifest], bool]) -> Checkpoint | None:
        latest = self.store.latest()
        damages = []
        for name in self.store.by_trust():
            try:
                manifest = manifest_of(self.store, name)
                if not is_wanted(manifest):
                    continue
                self._refuse_mismatch(name, manifest)
                checkpoint = self._load(name, manifest)
            except CheckpointDamaged as damage:
                if name in self.store.names():
                    damages.append(str(damage))
                elif self.store.latest() != latest:
                    raise _Outdated from damage
                continue  # it was deleted, or LATEST names what does not exist
            if name != latest and self.store.latest() != latest:
                raise _Outdated  # this one may not have been acknowledged yet
            for damaged in damages:
                self.warn(damaged)
            if name != latest:
                named = "is missing or unreadable" if latest is None else f"names {latest}"
                where = f"{self.store.location}/LATEST"
                self.warn(f"{where} {named}; the newest intact checkpoint is {name}")
            return checkpoint
        if damages:
            raise CheckpointDamaged(
                f"no checkpoint in {self.store.location} is intact ({'; '.join(damages)}). Restore "
                "a copy of the directory, or remove it to start from the beginning"
            )
        return None

    def newest_of_last_job(self, step: StepChoice | None = None) -> Checkpoint | None:
        """Return the newest intact checkpoint of the job that saved last, or that of a step.

        Raises as `newest`, and `CheckpointMismatch` if there is none of that step.
        """
        uid = self.last_uid()
        if step is None:
            return self.newest(lambda manifest: manifest.job_uid == uid)
        for name in self.store.by_trust():
            with suppress(CheckpointDamaged):
                manifest = manifest_of(self.store, name)
                if manifest.job_uid == uid and manifest.is_at(step):
                    break
        else:
            raise CheckpointMismatch(
                f"{self.store.location} has no checkpoint of step {step} any more: resume from "
                "another one (muster checkpoint ls lists them)"
            )
        return self.named(name)

    def named(self, name: CheckpointName) -> Checkpoint:
        """Return exactly this checkpoint; raises `CheckpointDamaged` and `CheckpointMismatch`."""
        manifest = manifest_of(self.store, name)
        self._refuse_mismatch(name, manifest)
        return self._load(name, manifest)

    def last_uid(self) -> str | None:
        """Return the uid of the job that saved here last; None for a process started by hand.

        Generations count within one job, so those of several jobs cannot be compared: LATEST
        decides, or else the latest time in a manifest.
        """
        latest = self.store.latest()
        if latest is not None:
            with suppress(CheckpointDamaged):
                return manifest_of(self.store, latest).job_uid
        candidates = []
        for name in self.store.names():
            with suppress(CheckpointDamaged):
                manifest = manifest_of(self.store, name)
                candidates.append((manifest.time, manifest.job_uid))
        return max(candidates, default=(None, None), key=lambda found: found[0])[1]

    def load(self, name: CheckpointName) -> Checkpoint:
        """Return a checkpoint, every byte of it verified; raises `CheckpointDamaged`."""
        return self._load(name, manifest_of(self.store, name))

    def _load(self, name: CheckpointName, manifest: Manifest) -> Checkpoint:
        where = f"{self.store.location}/{name}/{STATE}"
        content = None
        if facts := manifest.files.get(STATE):
            content = self.store.read(name, STATE, facts.size_bytes)
            if len(content) != facts.size_bytes or xxh3_64_hexdigest(content) != facts.xxh3:
                raise CheckpointDamaged(f"{where} does not match its hash")
        state = unpack(content, manifest.state_values, where)
        return Checkpoint(name=name, manifest=manifest, state=state)

    def _refuse_mismatch(self, name: CheckpointName, manifest: Manifest) -> None:
        if manifest.rank != self.rank or self.world_size not in {None, manifest.world_size}:
            raise CheckpointMismatch(
                f"{self.store.location}/{name} is of rank {manifest.rank} of "
                f"{manifest.world_size}, and this is rank {self.rank} of {self.world_size}: use "
                "the world size it was saved with, or start a new job with another id and no "
                "resume_from"
            )
