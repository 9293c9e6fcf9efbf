"""Finds the newest intact checkpoint; every byte is verified before it is used.

The order of trust: the highest generation first (a fenced process may have turned LATEST back),
within it the checkpoint that LATEST names, then the steps from new to old. LATEST says where to
look first; only the hashes decide. Reading changes nothing, and starts again if a running job has
meanwhile deleted or recycled what was being read.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_64_hexdigest

from muster.checkpoints.errors import CheckpointDamaged, CheckpointMismatch, checkpoint_errors
from muster.checkpoints.format import unpack
from muster.checkpoints.local import FileSystem
from muster.checkpoints.manifest import (
    LATEST,
    LATEST_LIMIT_BYTES,
    MANIFEST,
    MANIFEST_LIMIT_BYTES,
    STATE,
    CheckpointName,
    Manifest,
    decode_manifest,
    parse_latest,
)
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
    """Reads one rank's directory: that of its own job, or of the job it resumes from."""

    files: FileSystem
    directory: Path
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
        raise CheckpointDamaged(f"{self.directory} changes faster than it can be read: try again")

    def _newest(self, is_wanted: Callable[[Manifest], bool]) -> Checkpoint | None:
        latest = self.latest()
        damages = []
        for name in self.by_trust():
            try:
                manifest = self.manifest(name)
                if not is_wanted(manifest):
                    continue
                self._refuse_mismatch(name, manifest)
                checkpoint = self._load(name, manifest)
            except CheckpointDamaged as damage:
                if name not in self.names():
                    raise _Outdated from damage
                damages.append(str(damage))
                continue
            for damaged in damages:
                self.warn(damaged)
            if name != latest:
                named = "is missing or unreadable" if latest is None else f"names {latest}"
                self.warn(
                    f"{self.directory}/LATEST {named}; the newest intact checkpoint is {name}"
                )
            return checkpoint
        if damages:
            raise CheckpointDamaged(
                f"no checkpoint in {self.directory} is intact ({'; '.join(damages)}). Restore a "
                "copy of the directory, or remove it to start from the beginning"
            )
        return None

    def newest_of_last_job(self) -> Checkpoint | None:
        """Return the newest intact checkpoint of the job that saved last; raises as `newest`."""
        uid = self.last_uid()
        return self.newest(lambda manifest: manifest.job_uid == uid)

    def last_uid(self) -> str | None:
        """Return the uid of the job that saved here last; None for a process started by hand.

        Generations count within one job, so those of several jobs cannot be compared: LATEST
        decides, or else the latest time in a manifest.
        """
        latest = self.latest()
        candidates = []
        for name in self.names():
            with suppress(CheckpointDamaged):
                manifest = self.manifest(name)
                candidates.append(((name == latest, manifest.time), manifest.job_uid))
        return max(candidates, default=(None, None), key=lambda found: found[0])[1]

    def latest(self) -> CheckpointName | None:
        """Return the name in LATEST; None if it is missing, unreadable, torn or not ours."""
        try:
            return parse_latest(self.files.read(f"{self.directory}/{LATEST}", LATEST_LIMIT_BYTES))
        except OSError:
            return None

    def names(self) -> list[CheckpointName]:
        """Return the names of all checkpoints, in no order."""
        with checkpoint_errors("listing", str(self.directory)):
            try:
                found = self.files.list_directory(str(self.directory))
            except FileNotFoundError:
                return []
        return [name for text in found if (name := CheckpointName.parse(text))]

    def by_trust(self) -> list[CheckpointName]:
        """Return the same in the order of trust: a restart tries the first one first."""
        latest = self.latest()
        return sorted(
            self.names(), key=lambda name: (name.generation, name == latest, name), reverse=True
        )

    def load(self, name: CheckpointName) -> Checkpoint:
        """Return a checkpoint, every byte of it verified; raises `CheckpointDamaged`."""
        return self._load(name, self.manifest(name))

    def manifest(self, name: CheckpointName) -> Manifest:
        """Return a checkpoint's verified manifest; raises `CheckpointDamaged`."""
        where = f"{self.directory}/{name}/{MANIFEST}"
        manifest = decode_manifest(self._read(where, MANIFEST_LIMIT_BYTES), where)
        if not manifest.is_named(name):
            raise CheckpointDamaged(f"{where} belongs to another directory")
        return manifest

    def _load(self, name: CheckpointName, manifest: Manifest) -> Checkpoint:
        where = f"{self.directory}/{name}/{STATE}"
        content = None
        if facts := manifest.files.get(STATE):
            content = self._read(where, facts.size_bytes)
            if len(content) != facts.size_bytes or xxh3_64_hexdigest(content) != facts.xxh3:
                raise CheckpointDamaged(f"{where} does not match its hash")
        state = unpack(content, manifest.values, where)
        return Checkpoint(name=name, manifest=manifest, state=state)

    def _read(self, path: str, limit_bytes: int) -> bytearray:
        try:
            return self.files.read(path, limit_bytes)
        except OSError as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error.strerror or error}") from error

    def _refuse_mismatch(self, name: CheckpointName, manifest: Manifest) -> None:
        if manifest.rank != self.rank or self.world_size not in {None, manifest.world_size}:
            raise CheckpointMismatch(
                f"{self.directory}/{name} is of rank {manifest.rank} of {manifest.world_size}, and "
                f"this is rank {self.rank} of {self.world_size}: use the world size it was saved "
                "with, or start a new job with another id and no resume_from"
            )
