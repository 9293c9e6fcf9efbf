"""Cuts the power after every operation of a history, and runs the production reader.

The protocol must survive every cut. Deliberately broken protocols must not, or the search would
prove nothing.
"""

import random
from collections.abc import Callable

import pytest

from muster.checkpoints.comparison import identity_of
from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.format import decode_arrays
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manifest import LATEST, CheckpointName, temporary_latest
from muster.checkpoints.reader import Checkpoint
from muster.checkpoints.store import manifest_of
from tests.support.checkpoint_ranks import DIRECTORY, Rank, owner
from tests.support.crash_histories import (
    Forgetful,
    History,
    Session,
    expected,
    explore,
    production_restore,
)
from tests.support.crash_simulator import CrashMode, MemoryFileSystem, Operation, crash_states

HISTORIES = {
    "saves, deletions and recycled directories": (Session(0, (1, 2, 3, 4, 5, 6)),),
    "a restart that goes back some steps": (Session(0, (3, 6, 9)), Session(1, (6, 9, 12))),
    "a process killed while it deletes, and its successor": (
        Session(0, (1, 2, 3, 4), lives_for=96),
        Session(1, (4, 5)),
    ),
    "three processes killed in their first save": (
        Session(0, (1,), lives_for=9),
        Session(1, (1,), lives_for=20),
        Session(2, (1,), lives_for=36),
        Session(3, (1, 2)),
    ),
}


@pytest.mark.parametrize("keep_last", [1, 2])
@pytest.mark.parametrize("sessions", HISTORIES.values(), ids=list(HISTORIES))
def test_no_power_cut_loses_acknowledged_checkpoints(
    sessions: tuple[Session, ...], keep_last: int
) -> None:
    history = History(keep_last=keep_last).play(*sessions)
    findings = explore(history)
    assert history.acknowledged
    assert findings.states > 100
    assert findings.violations == {}


@pytest.mark.parametrize("lives_for", range(4, 40))
def test_successor_of_a_killed_process_saves_durably(lives_for: int) -> None:
    history = History().play(Session(0, (1, 2), lives_for=lives_for), Session(1, (3,)))
    findings = explore(history, limit=8)
    assert findings.violations == {}


def test_recovery_is_repeatable_and_interruptible() -> None:
    history = History().play(Session(0, (1, 2, 3)))
    files = MemoryFileSystem()
    draw = random.Random(7)  # noqa: S311  no secret
    for count, operation in enumerate(history.files.operations):
        files.replay([operation])
        for survivor in crash_states(files, CrashMode.ANY, limit=4, seed=count):
            acknowledged = [at for at in history.acknowledged if at <= count + 1]
            first = production_restore(survivor, 1)
            second = production_restore(survivor, 1)
            assert (first and first.manifest) == (second and second.manifest)
            again = History(files=survivor)
            start = len(survivor.operations)
            again.play(
                Session(1, (7,), lives_for=draw.randrange(1, 40)),
                Session(2, (8,), lives_for=draw.randrange(1, 60)),
            )
            assert len(survivor.operations) > start
            last = production_restore(survivor, 3)
            if acknowledged or again.acknowledged:
                assert last is not None
                assert last.name >= max([*again.acknowledged.values(), CheckpointName(0, 0)])
            if last:
                assert identity_of(last) == expected(last.name)


def after_the_rename_of_a_checkpoint(kind: str, _path: str, operations: list[Operation]) -> bool:
    last = operations[-1]
    return (
        kind == "directory"
        and last.name == "rename"
        and not str(last.arguments[1]).endswith(LATEST)
    )


FORGOTTEN = {
    "every directory": lambda kind, _path, _operations: kind == "directory",
    "every file": lambda kind, _path, _operations: kind == "file",
    "the arrays": lambda _kind, path, _operations: path.endswith("state.safetensors"),
    "the manifest": lambda _kind, path, _operations: path.endswith("manifest.json"),
    "the new LATEST": lambda kind, path, _operations: kind == "file" and LATEST in path,
    "the temporary directory": lambda kind, path, _operations: (
        kind == "directory" and path.endswith(".tmp")
    ),
    "the rank's directory": lambda _kind, path, _operations: path == str(DIRECTORY),
    "the job's directory": lambda _kind, path, _operations: path == str(DIRECTORY.parent),
    "the directory between rename and LATEST": after_the_rename_of_a_checkpoint,
}


@pytest.mark.parametrize("forgets", FORGOTTEN.values(), ids=list(FORGOTTEN))
def test_missing_fsync_is_detected(
    forgets: Callable[[str, str, list[Operation]], bool],
) -> None:
    history = History(files=Forgetful(forgets)).play(Session(0, (1, 2, 3)))
    assert explore(history, limit=30).violations.total() > 0


class LatestFirst(LocalStore):
    """Replaces LATEST before the checkpoint exists."""

    def _rename(self, temporary: str, name: str) -> None:
        if name != LATEST:
            super()._rename(f"{DIRECTORY}/{temporary_latest(0)}", LATEST)
            super()._rename(temporary, name)


class DeletesFirst(LocalStore):
    """Deletes old checkpoints before the new one is found."""

    def _fill(self, *arguments):  # noqa: ANN002, ANN202  as in the parent
        for text in self._files.list_directory(str(DIRECTORY)):
            if older := CheckpointName.parse(text):
                self._files.rename(f"{DIRECTORY}/{text}", f"{DIRECTORY}/{older.temporary()}")
                self._remove(f"{DIRECTORY}/{older.temporary()}")
        return super()._fill(*arguments)


class DeletesInPlace(LocalStore):
    """Deletes old checkpoints under their own names, before LATEST is durable."""

    def _rename(self, temporary: str, name: str) -> None:
        if name == LATEST:
            texts = self._files.list_directory(str(DIRECTORY))
            _newest, *older = sorted(filter(None, map(CheckpointName.parse, texts)), reverse=True)
            for checkpoint in older:
                self._remove(f"{DIRECTORY}/{checkpoint}")
        super()._rename(temporary, name)


@pytest.mark.parametrize("kind", [LatestFirst, DeletesFirst, DeletesInPlace])
def test_wrong_order_is_detected(kind: type[LocalStore]) -> None:
    history = History(kind=kind, keep_last=1).play(Session(0, (1, 2, 3)))
    assert explore(history, limit=30).violations.total() > 0


def test_reader_without_verification_returns_torn_bytes() -> None:
    history = History(files=Forgetful(FORGOTTEN["the arrays"])).play(Session(0, (1, 2, 3)))
    assert explore(history, limit=30).violations["torn"] == 0
    assert explore(history, trusting_restore, limit=30).violations["torn"] > 0


def trusting_restore(files: MemoryFileSystem, generation: int) -> Checkpoint | None:
    """Read the checkpoint that LATEST names without verifying it."""
    rank = Rank(files=files, owner=owner(generation=generation))
    name = rank.store.latest()
    if name is None or str(name) not in files.list_directory(str(DIRECTORY)):
        return None
    manifest = manifest_of(rank.store, name)
    size_bytes = manifest.files["state.safetensors"].size_bytes
    content = bytearray(files.tree().get(f"{DIRECTORY}/{name}/state.safetensors", b""))
    try:
        arrays = decode_arrays(content.ljust(size_bytes, b"\0"), "")
    except CheckpointDamaged:
        arrays = {}
    return Checkpoint(name=name, manifest=manifest, state={**arrays, **manifest.values})
