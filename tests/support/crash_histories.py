"""Plays histories of saves, cuts the power after each operation, and checks what is left."""

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from muster.checkpoints.comparison import identity, identity_of
from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manifest import LATEST, CheckpointName, parse_latest
from muster.checkpoints.reader import Checkpoint
from tests.support.checkpoint_ranks import DIRECTORY, Rank, owner, position, state
from tests.support.crash_simulator import CrashMode, MemoryFileSystem, Operation, crash_states

Restore = Callable[[MemoryFileSystem, int], Checkpoint | None]


class Killed(BaseException):
    """The process was killed: no handler runs."""


@dataclass
class Mortal:
    """A file system that kills its process at a given operation."""

    files: MemoryFileSystem
    dies_at: int

    def __getattr__(self, name: str) -> object:
        if len(self.files.operations) >= self.dies_at:
            raise Killed
        return getattr(self.files, name)


@dataclass(frozen=True)
class Session:
    """One process: its generation, the steps it saves, and its number of operations."""

    generation: int
    steps: tuple[int, ...]
    lives_for: int = 10**9


@dataclass
class History:
    """The recorded operations, and the checkpoints acknowledged after each."""

    files: MemoryFileSystem = field(default_factory=MemoryFileSystem)
    keep_last: int = 2
    kind: type[LocalStore] = LocalStore
    acknowledged: dict[int, CheckpointName] = field(default_factory=dict)

    def play(self, *sessions: Session) -> "History":
        for session in sessions:
            try:
                self._play(session)
            except Killed:
                continue
        return self

    def _play(self, session: Session) -> None:
        rank = Rank(
            files=Mortal(self.files, len(self.files.operations) + session.lives_for),
            owner=owner(generation=session.generation),
            keep_last=self.keep_last,
            kind=self.kind,
        )
        rank.restored()
        for step in session.steps:
            rank.save(step)
            name = CheckpointName(session.generation, step)
            self.acknowledged[len(self.files.operations)] = name


class Forgetful(MemoryFileSystem):
    """Skips every fsync for which `forgets` (kind, path, operations) is true."""

    def __init__(self, forgets: Callable[[str, str, list[Operation]], bool]) -> None:
        super().__init__()
        self._forgets = forgets
        self._paths: dict[int, str] = {}

    def create(self, path: str) -> int:
        descriptor = super().create(path)
        self._paths[descriptor] = path
        return descriptor

    def fsync(self, descriptor: int) -> None:
        if not self._forgets("file", self._paths[descriptor], self.operations):
            super().fsync(descriptor)

    def fsync_directory(self, path: str) -> None:
        if not self._forgets("directory", path, self.operations):
            super().fsync_directory(path)


@dataclass
class Findings:
    states: int = 0
    violations: Counter[str] = field(default_factory=Counter)


def production_restore(files: MemoryFileSystem, generation: int) -> Checkpoint | None:
    return Rank(files=files, owner=owner(generation=generation)).manager.restore()


def explore(history: History, restore: Restore = production_restore, limit: int = 200) -> Findings:
    """Check every state that may be left after each operation; count violations."""
    findings = Findings()
    files = MemoryFileSystem()
    newest = None
    seen: set[bytes] = set()
    for count, operation in enumerate(history.files.operations, start=1):
        files.replay([operation])
        newest = history.acknowledged.get(count, newest)
        for mode in CrashMode:
            for survivor in crash_states(files, mode, limit=limit, seed=count):
                key = pickle.dumps((newest, survivor.tree()))
                if key not in seen:
                    seen.add(key)
                    findings.states += 1
                    findings.violations.update(violations(survivor, newest, restore))
    return findings


def violations(
    files: MemoryFileSystem, newest: CheckpointName | None, restore: Restore
) -> list[str]:
    found = []
    try:
        checkpoint = restore(files, 9)
    except CheckpointDamaged:
        return ["unrestorable"]
    if newest and (checkpoint is None or checkpoint.name < newest):
        found.append("lost")
    if checkpoint and identity_of(checkpoint) != expected(checkpoint.name):
        found.append("torn")
    if not is_latest_right(files, checkpoint):
        found.append("LATEST")
    return found


@cache
def expected(name: CheckpointName) -> str:
    return identity(state(name.generation, name.step), position(name.step))


def is_latest_right(files: MemoryFileSystem, checkpoint: Checkpoint | None) -> bool:
    """Return whether LATEST, if it exists, names the restored checkpoint.

    Only a new generation's first checkpoint may be found before LATEST names it.
    """
    content = files.tree().get(f"{DIRECTORY}/{LATEST}")
    if content is None:
        return True
    latest = parse_latest(content)
    if latest is None or checkpoint is None:
        return False
    return checkpoint.name == latest or checkpoint.name.generation > latest.generation
