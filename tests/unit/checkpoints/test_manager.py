"""Saving and restoring without failures, and the order of the durable steps."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from muster.checkpoints.comparison import identity, identity_of
from muster.checkpoints.errors import RestoreDamaged
from muster.checkpoints.format import Packed
from muster.checkpoints.local_store import RECYCLED_LIMIT_BYTES, LocalStore
from muster.checkpoints.manager import SaveCost, expendable
from muster.checkpoints.manifest import (
    BEST,
    LATEST,
    WITNESS,
    CheckpointName,
    Manifest,
    RestorePoint,
)
from tests.support.checkpoint_ranks import (
    NOON,
    Rank,
    flipped,
    manager_of,
    owner,
    position,
    state,
)


def test_saved_state_is_restored() -> None:
    rank = Rank()
    assert rank.manager.restore() is None
    assert rank.files.tree() == {}
    rank.save(5)
    checkpoint = rank.manager.restore()
    assert checkpoint is not None
    assert checkpoint.step == 5
    assert checkpoint.position == position(5)
    saved = state(0, 5)
    assert checkpoint.state.keys() == saved.keys()
    np.testing.assert_array_equal(checkpoint.state["weights"], saved["weights"])
    assert checkpoint.state["loss"] is None
    assert identity_of(checkpoint) == identity(saved, position(5))
    assert rank.warnings == []


def test_manifest_fields_of_a_save() -> None:
    manifest = Rank().manager.save(3, position(3), {"lr": 0.1})
    assert (manifest.step, manifest.rank, manifest.world_size) == (3, 0, 2)
    assert (manifest.job_id, manifest.job_uid, manifest.generation) == ("job", "uid", 0)
    assert manifest.time == NOON.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert len(manifest.manifest_xxh3) == 16
    assert manifest.files == {}


WITNESSES = {
    "whole": (lambda content: content, b'{"seen": 1}'),
    "torn": (lambda content: content[:-1], b""),
    "lost": (lambda _: b"", b""),
    "never flushed": (lambda content: bytes(len(content)), b""),
    "changed": (lambda content: content.replace(b"1", b"2"), b""),
    "foreign": (lambda _: b"[" * 100_000, b""),
    "another's": (lambda content: content.replace(b"05", b"04"), b""),
}


@pytest.mark.parametrize("case", WITNESSES)
def test_only_a_whole_witness_of_the_newest_checkpoint_is_returned(
    tmp_path: Path, case: str
) -> None:
    damage, found = WITNESSES[case]
    manager = manager_of(LocalStore(tmp_path), owner(), print)
    assert manager.witness() == b""
    manager.put_witness(b"{}")  # beside nothing
    manager.save(5, position(5), {"bias": 5})
    assert manager.witness() == b""
    manager.put_witness(b'{"seen": 1}')
    file = tmp_path / str(CheckpointName(0, 5)) / WITNESS
    file.write_bytes(damage(file.read_bytes()))
    assert manager_of(LocalStore(tmp_path), owner(), print).witness() == found
    manager.save(6, position(6), {"bias": 6})
    assert manager.witness() == b""


def test_a_replaced_writer_leaves_the_witness_of_its_successor(tmp_path: Path) -> None:
    stale, successor = (
        manager_of(LocalStore(tmp_path), owner(generation=it), print) for it in (0, 1)
    )
    stale.save(5, position(5), {"bias": 5})
    successor.save(6, position(6), {"bias": 6})
    successor.put_witness(b"1")
    stale.put_witness(b"2")
    assert successor.witness() == b"1"


def steps_of_a_save(rank: Rank, step: int) -> list[str]:
    """Save, and return the operations whose order matters."""
    before = len(rank.files.operations)
    rank.save(step)
    return [
        operation.name
        for operation in rank.files.operations[before:]
        if operation.name not in ("read", "write", "close", "is_directory", "list_directory")
    ]


def test_save_follows_the_durable_sequence() -> None:
    rank = Rank()
    rank.save(1, 2)
    assert steps_of_a_save(rank, 3) == [
        *("make_directory", "create", "fsync", "create", "fsync", "fsync_directory"),
        *("create", "fsync"),
        *("rename", "fsync_directory", "rename", "fsync_directory"),
        *("rename", "remove_file"),  # of a witness, if there is one
    ]


def test_small_save_recycles_a_hidden_directory() -> None:
    rank = Rank()
    rank.save(1, 2, 3, 4)
    assert steps_of_a_save(rank, 5) == [
        *("overwrite", "fsync", "overwrite", "fsync", "create", "fsync"),
        *("rename", "fsync_directory", "rename", "fsync_directory"),
        *("rename", "remove_file"),  # of a witness, if there is one
    ]
    assert rank.manager.restore().state["bias"] == 5


def test_recycled_directory_takes_states_of_any_length() -> None:
    rank = Rank()
    lengths = (40, 40, 40, 40, 7, 90, 40, 1, 200)
    for step, length in enumerate(lengths):
        rank.manager.save(step, position(step), {"weights": np.full(length, step, np.float32)})
    restored = rank.manager.restore()
    assert restored is not None
    assert restored.state["weights"].tolist() == [8.0] * 200
    assert Rank(rank.files, keep_last=2).restored() == CheckpointName(0, 8)


def test_large_or_empty_states_are_not_recycled() -> None:
    rank = Rank()
    for step in range(4):
        rank.manager.save(
            step, position(step), {"weights": np.zeros(RECYCLED_LIMIT_BYTES, np.uint8)}
        )
    for step in range(4, 8):
        rank.manager.save(step, position(step), {"loss": 0.5})
    assert rank.on_disk() == [LATEST, "step_0000000006.g0000", "step_0000000007.g0000"]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_retention_keeps_last_and_removes_temporaries(keep_last: int) -> None:
    rank = Rank(keep_last=keep_last)
    rank.save(*range(6))
    rank.manager.close()
    kept = [f"step_{step:010d}.g0000" for step in range(6 - keep_last, 6)]
    assert rank.on_disk() == [LATEST, *kept]


BY_HAND = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from tests.support.crash_simulator import MemoryFileSystem
from muster.checkpoints.manifest import Owner
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manager import CheckpointManager
from muster.contracts.shards import Position
manager = CheckpointManager(
    store=LocalStore(Path("/c"), print, MemoryFileSystem()), keep_last=1, warn=print,
    owner=Owner(job_id="j", job_uid=None, rank=0, world_size=1, generation=None),
    clock=lambda: datetime.now(UTC),
)
events = []
sys.addaudithook(lambda event, _: events.append(event))
manager.save(1, Position(), {"best": float("inf")})
manager.save(2, Position(), {"best": 0.5})
assert manager.restore().state == {"best": 0.5}
assert 'numpy' not in sys.modules
assert not [event for event in events if event.startswith(('open', 'os.'))]
"""


def test_save_needs_no_numpy_and_only_the_port() -> None:
    subprocess.run([sys.executable, "-c", BY_HAND], check=True, cwd=Path(__file__).parents[3])


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="keep_last"):
        Rank(keep_last=0)
    rank = Rank()
    with pytest.raises(ValueError, match="steps count from 0"):
        rank.save(-1)
    assert rank.files.tree() == {}


CASES = [
    # have, latest, trusted, keep_last, gone
    ({1, 2, 3}, 3, {3}, 1, [2, 1]),
    ({1, 2, 3, 4}, 4, {3, 4}, 2, [2, 1]),
    ({1, 2, 3, 4}, 4, {4}, 2, []),
    ({1, 2, 3, 4}, 4, {2, 4}, 2, [1]),
    ({1, 2, 3, 4}, 4, {3, 4}, 3, [1]),
    ({1, 2, 3, 4}, 4, {3, 4}, 9, []),
    ({1}, 1, {1}, 1, []),
    # A program that went back: LATEST stays, though others have later steps.
    ({2, 8, 9}, 2, {2, 8, 9}, 2, [8]),
    ({2, 8, 9}, 2, {2, 8, 9}, 1, [9, 8]),
]


@pytest.mark.parametrize(("have", "latest", "trusted", "keep_last", "gone"), CASES)
def test_expendable_checkpoints(
    have: set[int], latest: int, trusted: set[int], keep_last: int, gone: list[int]
) -> None:
    def named(steps: set[int]) -> set[CheckpointName]:
        return {CheckpointName(0, step) for step in steps}

    found = expendable(named(have), CheckpointName(0, latest), named(trusted), keep_last)
    assert [name.step for name in found] == gone


def test_the_best_checkpoint_is_kept_beside_the_newest() -> None:
    rank = Rank()
    assert rank.manager.best() is None
    for step, mark in enumerate([{}, {BEST: 0.5}, {BEST: 0.25}, {}, {}, {}]):
        rank.manager.save(step, position(step), {"lr": 0.1, **mark})
    assert [it.step for it in sorted(rank.store.names())] == [2, 4, 5]
    assert rank.restored() == CheckpointName(0, 5)
    later = Rank(files=rank.files, owner=owner(generation=1))
    assert later.manager.best() == 0.25
    later.save(6, 7, 8)
    assert [it.step for it in sorted(later.store.names())] == [2, 7, 8]


def test_costly_saves_are_reported_with_the_remedy() -> None:
    """A step takes 0.01 s, a save after every five of them 0.02 s."""
    cost, now, said = SaveCost(), 0.0, []
    for step in range(5, 2000, 5):
        now += 0.05
        said.append(cost.warning(step, now, now + 0.02))
        now += 0.02
    warning = next(filter(None, said))
    assert warning.startswith("spends 29% of its time on saving (20 ms every 5 steps): ")
    assert "checkpoint_every 18 makes it 10%" in warning


def test_cheap_saves_are_not_reported() -> None:
    cost = SaveCost()
    assert not any(cost.warning(step, step, step + 0.05) for step in range(100))


class Replaced(LocalStore):
    """A successor saves between a commit and the removal of old checkpoints."""

    def commit(self, unsigned: Manifest, packed: Packed) -> tuple[CheckpointName, Manifest]:
        found = super().commit(unsigned, packed)
        Rank(self._files, owner(generation=1)).save(9)
        return found


def test_checkpoint_of_a_successor_is_never_retired() -> None:
    stale = Rank(keep_last=1, kind=Replaced)
    stale.save(1)
    assert Rank(stale.files).restored() == CheckpointName(1, 9)


# Ranks of a gang, which go on from one checkpoint

SIXTH = "step_0000000006.g0000"


def gang_rank(first: Rank, restore_from: str, generation: int = 1, **more: object) -> Rank:
    """Return the rank in a later attempt of its gang."""
    then = owner(generation=generation, restore_from=restore_from)
    return Rank(files=first.files, owner=then, keep_last=9, **more)


def test_gang_goes_back_to_the_checkpoint_of_all_ranks() -> None:
    first = Rank(keep_last=9)
    first.save(3, 6, 9)
    second = gang_rank(first, SIXTH)
    second.manager.claim()
    assert second.on_disk() == [LATEST, "step_0000000003.g0000", SIXTH]
    assert str(second.restored()) == str(second.store.latest()) == SIXTH
    second.save(9)
    repeated = gang_rank(first, SIXTH)  # a restarted storage process claims again
    repeated.manager.claim()
    assert str(repeated.store.latest()) == "step_0000000009.g0001"
    assert second.warnings == []


@pytest.mark.parametrize("point", ["none", f"{SIXTH}@1"])
def test_rank_without_the_checkpoint_starts_from_scratch(point: str) -> None:
    first = Rank(keep_last=9)
    first.save(3)
    second = gang_rank(first, point)
    second.manager.claim()
    assert second.restored() is None
    assert second.store.names() == first.store.names()


def test_a_typing_error_in_a_restore_point_deletes_nothing() -> None:
    for text in ("", "None", "step_6.g0", "resume_from/none"):
        with pytest.raises(ValueError, match="is not a restore point"):
            RestorePoint.parse(text)
    for point in (
        RestorePoint(),
        RestorePoint(CheckpointName(2, 30), is_inherited=True, savers=(0, 12)),
    ):
        assert RestorePoint.parse(str(point)) == point


def test_a_checkpoint_that_has_gone_is_no_reason_to_begin_again() -> None:
    rank = gang_rank(Rank(), SIXTH)
    rank.manager.claim()
    with pytest.raises(RestoreDamaged):
        rank.restored()


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors"])
def test_damage_is_reported_to_the_gang(file: str) -> None:
    first = Rank(keep_last=9)
    first.save(3, 6)
    path = f"{first.directory}/{SIXTH}/{file}"
    content = first.files.read(path, 1 << 20)
    descriptor = first.files.overwrite(path, len(content))
    first.files.write(descriptor, flipped(content, 9, 1))
    first.files.close(descriptor)
    second = gang_rank(first, SIXTH)
    second.manager.claim()
    with pytest.raises(RestoreDamaged, match="resume from an older one"):
        second.restored()
    assert "step_0000000003.g0000" in second.on_disk()


def test_gang_resumes_from_what_it_inherits() -> None:
    earlier = Rank(owner=owner(uid="earlier"), keep_last=9)
    earlier.save(6, 9)
    first = Rank(files=earlier.files, directory=Path("/checkpoints/next/worker_0"))
    first.save(12)
    places = {"directory": first.directory, "inherited": earlier.directory}
    second = gang_rank(first, f"resume_from/{SIXTH}", **places)
    second.manager.claim()
    assert str(second.restored()) == SIXTH
    assert len(first.store.names()) == 1
    assert len(earlier.store.names()) == 2


def test_gang_under_the_same_id_deletes_what_only_some_had() -> None:
    """Otherwise the next save of that step would get other names on other ranks."""
    earlier = Rank(owner=owner(uid="earlier"), keep_last=9)
    earlier.save(3, 6, 9)
    again = gang_rank(earlier, f"resume_from/{SIXTH}", generation=0, inherited=earlier.directory)
    again.manager.claim()
    assert str(again.restored()) == str(again.store.latest()) == SIXTH
    again.save(9)
    assert str(again.store.latest()) == "step_0000000009.g0000"
