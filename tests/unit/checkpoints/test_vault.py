"""What a vault promises while nothing goes wrong: what comes back, in which order."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from vaults import NOON, Rank, position, state

from muster.checkpoints.identity import identity, identity_of
from muster.checkpoints.names import LATEST, CheckpointName
from muster.checkpoints.spares import RECYCLED_LIMIT_BYTES


def test_what_was_saved_comes_back() -> None:
    rank = Rank()
    rank.save(5)
    checkpoint = rank.vault.restore()
    assert checkpoint is not None
    assert checkpoint.step == 5
    assert checkpoint.position == position(5)
    saved = state(0, 5)
    assert checkpoint.state.keys() == saved.keys()
    np.testing.assert_array_equal(checkpoint.state["weights"], saved["weights"])
    assert checkpoint.state["loss"] is None
    assert identity_of(checkpoint) == identity(saved, position(5))
    assert rank.warnings == []


def test_a_new_job_has_nothing_to_restore() -> None:
    rank = Rank()
    assert rank.vault.restore() is None
    assert rank.files.tree() == {}


def test_the_manifest_says_who_saved_what_and_when() -> None:
    manifest = Rank().vault.save(3, position(3), {"lr": 0.1})
    assert (manifest.step, manifest.rank, manifest.world_size) == (3, 0, 2)
    assert (manifest.job_id, manifest.job_uid, manifest.generation) == ("job", "uid", 0)
    assert manifest.time == NOON.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    assert len(manifest.manifest_xxh3) == 16
    assert manifest.files == {}


def steps_of_a_save(rank: Rank, step: int) -> list[str]:
    """Save, and return what was done to the disk but for what needs no order."""
    before = len(rank.files.operations)
    rank.save(step)
    return [
        operation.name
        for operation in rank.files.operations[before:]
        if operation.name not in ("read", "write", "close", "is_directory", "list_directory")
    ]


def test_the_steps_of_a_save_come_in_the_one_safe_order() -> None:
    rank = Rank()
    rank.save(1, 2)
    assert steps_of_a_save(rank, 3) == [
        *("make_directory", "create", "fsync", "create", "fsync", "fsync_directory"),
        *("create", "fsync"),
        *("rename", "fsync_directory", "rename", "fsync_directory"),
        "rename",
    ]


def test_a_small_save_writes_over_a_retired_one_that_is_surely_hidden() -> None:
    rank = Rank()
    rank.save(1, 2, 3, 4)
    assert steps_of_a_save(rank, 5) == [
        *("overwrite", "fsync", "overwrite", "fsync", "create", "fsync"),
        *("rename", "fsync_directory", "rename", "fsync_directory"),
        "rename",
    ]
    assert rank.vault.restore().state["bias"] == 5


def test_a_spare_takes_a_shorter_state_and_a_longer_one() -> None:
    rank = Rank()
    lengths = (40, 40, 40, 40, 7, 90, 40, 1, 200)
    for step, length in enumerate(lengths):
        rank.vault.save(step, position(step), {"weights": np.full(length, step, np.float32)})
    restored = rank.vault.restore()
    assert restored is not None
    assert restored.state["weights"].tolist() == [8.0] * 200
    assert Rank(rank.files, keep_last=2).restored() == CheckpointName(0, 8)


def test_a_large_state_and_one_without_arrays_leave_no_spare() -> None:
    rank = Rank()
    for step in range(4):
        rank.vault.save(step, position(step), {"weights": np.zeros(RECYCLED_LIMIT_BYTES, np.uint8)})
    for step in range(4, 8):
        rank.vault.save(step, position(step), {"loss": 0.5})
    assert rank.on_disk() == [LATEST, "step_0000000006.g0000", "step_0000000007.g0000"]


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_last_ones_are_kept_and_nothing_temporary_is_left(keep_last: int) -> None:
    rank = Rank(keep_last=keep_last)
    rank.save(*range(6))
    rank.vault.close()
    kept = [f"step_{step:010d}.g0000" for step in range(6 - keep_last, 6)]
    assert rank.on_disk() == [LATEST, *kept]


def test_saving_a_step_again_keeps_the_acknowledged_one_until_the_new_one_is_durable() -> None:
    rank = Rank(keep_last=2)
    rank.save(4, 4, 4)
    rank.vault.close()
    assert rank.restored() == CheckpointName(0, 4, 2)
    assert rank.on_disk() == [LATEST, "step_0000000004.g0000.r0001", "step_0000000004.g0000.r0002"]


BY_HAND = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from muster.checkpoints.memory import MemoryFileSystem
from muster.checkpoints.owner import Owner
from muster.checkpoints.vault import Vault
from muster.contracts.position import Position
vault = Vault(
    files=MemoryFileSystem(), directory=Path("/c"), keep_last=1, warn=print,
    owner=Owner(job_id="j", job_uid=None, rank=0, world_size=1, generation=None),
    clock=lambda: datetime.now(UTC),
)
events = []
sys.addaudithook(lambda event, _: events.append(event))
vault.save(1, Position(), {"best": float("inf")})
vault.save(2, Position(), {"best": 0.5})
assert vault.restore().state == {"best": 0.5}
"""


def test_a_state_without_arrays_needs_no_numpy() -> None:
    run(BY_HAND + "assert 'numpy' not in sys.modules")


def test_nothing_goes_around_the_port() -> None:
    run(BY_HAND + "assert not [event for event in events if event.startswith(('open', 'os.'))]")


def run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("keep_last", [0, -1])
def test_a_vault_keeps_at_least_what_it_was_last_given(keep_last: int) -> None:
    with pytest.raises(ValueError, match="keep_last"):
        Rank(keep_last=keep_last)


def test_a_step_below_zero_has_no_name() -> None:
    rank = Rank()
    with pytest.raises(ValueError, match="steps count from 0"):
        rank.save(-1)
    assert rank.files.tree() == {}
