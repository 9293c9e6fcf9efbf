"""What a vault promises while nobody cuts the power: order, fences, fallbacks, refusals."""

import errno
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from vaults import DIRECTORY, NOON, Rank, flipped, owner, position, state

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointFailed,
    CheckpointMismatch,
    CheckpointNotWritable,
    StaleGeneration,
    UnsupportedState,
)
from muster.checkpoints.identity import identity, identity_of
from muster.checkpoints.memory import MemoryFileSystem
from muster.checkpoints.names import LATEST, MANIFEST, CheckpointName
from muster.checkpoints.reader import Reader
from muster.checkpoints.spares import RECYCLED_LIMIT_BYTES


def overwrite(files: MemoryFileSystem, path: str, content: bytes) -> None:
    """Put other bytes into a file, as bit rot or a stray process would."""
    files.remove_file(path)
    descriptor = files.create(path)
    files.write(descriptor, content)
    files.close(descriptor)


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


def test_the_steps_of_a_save_come_in_the_one_safe_order() -> None:
    rank = Rank()
    rank.save(1, 2)
    before = len(rank.files.operations)
    rank.save(3)
    verbs = [
        operation.name
        for operation in rank.files.operations[before:]
        if operation.name not in ("read", "write", "close", "is_directory", "list_directory")
    ]
    assert verbs == [
        *("make_directory", "create", "fsync", "create", "fsync", "fsync_directory"),
        *("create", "fsync"),
        *("rename", "fsync_directory", "rename", "fsync_directory"),
        "rename",
    ]


def test_a_small_save_writes_over_a_retired_one_that_is_surely_hidden() -> None:
    rank = Rank()
    rank.save(1, 2, 3, 4)
    before = len(rank.files.operations)
    rank.save(5)
    verbs = [
        operation.name
        for operation in rank.files.operations[before:]
        if operation.name not in ("read", "write", "close", "is_directory", "list_directory")
    ]
    assert verbs == [
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


def test_a_restarted_rank_goes_on_and_may_save_a_step_again() -> None:
    first = Rank(owner=owner(generation=0))
    first.save(5, 10)
    second = Rank(first.files, owner(generation=1))
    assert second.restored() == CheckpointName(0, 10)
    second.save(10)
    assert second.restored() == CheckpointName(1, 10)
    assert second.on_disk() == [LATEST, "step_0000000010.g0000", "step_0000000010.g0001"]


def test_a_lower_generation_is_fenced_and_nothing_moves() -> None:
    stale = Rank(owner=owner(generation=3))
    stale.save(1)
    Rank(stale.files, owner(generation=4)).save(2)
    before = stale.files.tree()
    for rank in (stale, Rank(stale.files, owner(generation=3))):
        with pytest.raises(StaleGeneration) as refusal:
            rank.save(9)
        assert (refusal.value.generation, refusal.value.newest) == (3, 4)
    assert stale.files.tree() == before


def latest_of(rank: Rank) -> CheckpointName | None:
    """Return what LATEST says, whatever is newer."""
    return rank.vault._reader.latest()  # noqa: SLF001  nobody else asks


class Sleeps(MemoryFileSystem):
    """Generation 0 is stopped before one of its calls; its successor comes, and saves, meanwhile.

    With a `successor_saves` of False it has only claimed by then, and read what there is.
    """

    def __init__(self, before: int, *, successor_saves: bool) -> None:
        super().__init__()
        self._before = before
        self._successor_saves = successor_saves
        self.successor: Rank | None = None
        self.restored: CheckpointName | None = None
        self.found: list[str] = []
        self.latest: CheckpointName | None = None

    def _record(self, name: str, *arguments: str | int | bytes) -> None:
        if len(self.operations) >= self._before and self.successor is None:
            self.successor = Rank(self, owner(generation=1))
            self.successor.vault.claim()
            self.restored = self.successor.restored()
            self.found = self.successor.on_disk()
            self.latest = latest_of(self.successor)
            if self._successor_saves:
                self.successor.save(3)
        super()._record(name, *arguments)


def calls_of_a_save(steps: tuple[int, ...]) -> range:
    """Return the numbers of the calls of the last of these saves."""
    rank = Rank()
    rank.save(*steps[:-1])
    start = len(rank.files.operations)
    rank.save(steps[-1])
    return range(start, len(rank.files.operations))


@pytest.mark.parametrize("successor_saves", [True, False])
@pytest.mark.parametrize("steps", [(7,), (5, 6, 7), (4, 5, 6, 7, 8)], ids=["new", "old", "spare"])
def test_whenever_a_saver_wakes_up_replaced_nothing_of_it_counts(
    steps: tuple[int, ...],
    successor_saves: bool,  # noqa: FBT001  a case
) -> None:
    for before in calls_of_a_save(steps):
        files = Sleeps(before, successor_saves=successor_saves)
        stale = Rank(files)
        stale.save(*steps[:-1])
        try:
            stale.save(steps[-1])
        except StaleGeneration:
            pass
        else:
            # It had committed before its successor looked, and lacked only the tidying up.
            assert files.restored == CheckpointName(0, steps[-1])
        assert latest_of(stale) == (CheckpointName(1, 3) if successor_saves else files.latest)
        theirs = {name for name in stale.on_disk() if re.match(r"step_.*\.g0000", name)}
        assert theirs <= set(files.found)
        files.successor.save(9)
        assert files.successor.restored() == CheckpointName(1, 9)
        assert not [words for words in files.successor.warnings if "delete" in words]
        with pytest.raises(StaleGeneration):
            stale.save(10)
        assert files.successor.restored() == CheckpointName(1, 9)


def test_a_claim_alone_fences() -> None:
    stale = Rank()
    stale.save(1)
    Rank(stale.files, owner(generation=1)).vault.claim()
    before = stale.files.tree()
    with pytest.raises(StaleGeneration):
        stale.save(2)
    assert stale.files.tree() == before


def test_started_by_hand_each_process_is_a_generation_of_its_own() -> None:
    files = MemoryFileSystem()
    by_hand = owner(uid=None, generation=None)
    first = Rank(files, by_hand)
    first.save(1, 2)
    second = Rank(files, by_hand)
    assert second.restored() == CheckpointName(0, 2)
    second.save(2)
    assert second.on_disk() == [LATEST, "step_0000000002.g0000", "step_0000000002.g0001"]
    with pytest.raises(StaleGeneration):
        first.save(3)


def test_another_jobs_checkpoints_are_neither_restored_nor_deleted_nor_a_fence() -> None:
    old = Rank(owner=owner(uid="old", generation=7))
    old.save(1, 2)
    new = Rank(old.files, owner(uid="new", generation=0), keep_last=1)
    assert new.restored() is None
    new.save(2, 3)
    assert new.restored() == CheckpointName(0, 3)
    assert new.warnings == []
    theirs = ["step_0000000001.g0007", "step_0000000002.g0007"]
    assert set(theirs) < set(new.on_disk())


def test_a_name_that_another_job_holds_is_walked_around() -> None:
    old = Rank(owner=owner(uid="old"))
    old.save(2)
    new = Rank(old.files, owner(uid="new"))
    new.save(2)
    assert new.restored() == CheckpointName(0, 2, 1)


def test_resuming_from_another_job_reads_whatever_its_uid() -> None:
    other = Rank(owner=owner(uid="old"))
    other.save(2)
    new = Rank(other.files, owner(uid="new"))
    assert new.restored() is None
    reader = Reader(
        files=other.files, directory=DIRECTORY, rank=0, world_size=2, warn=new.warnings.append
    )
    assert reader.newest().step == 2


@pytest.mark.parametrize("changed", [{"rank": 1}, {"world_size": 3}])
def test_a_checkpoint_of_another_place_is_refused(changed: dict[str, int]) -> None:
    rank = Rank()
    rank.save(1)
    with pytest.raises(CheckpointMismatch, match="rank 0 of 2"):
        Rank(rank.files, owner(**changed)).vault.restore()


LATEST_LINES = {
    "missing": None,
    "empty": b"",
    "torn": b"step_00000",
    "without its line end": b"step_0000000003.g0000",
    "pointing nowhere": b"step_0000000099.g0000\n",
    "a path": b"../../worker_1/step_0000000003.g0000\n",
    "an absolute path": b"/etc\n",
    "the parent": b"..\n",
    "two lines": b"step_0000000003.g0000\nstep_0000000002.g0000\n",
    "not text": b"\xff\xfe\x00\n",
    "other digits": "step_000000000\u0663.g0000\n".encode(),
    "very long": b"step_0000000003.g0000\n" * 1000,
}


@pytest.mark.parametrize("line", LATEST_LINES.values(), ids=list(LATEST_LINES))
def test_a_bad_latest_is_passed_over_with_a_warning(line: bytes | None) -> None:
    rank = Rank()
    rank.save(2, 3)
    if line is None:
        rank.files.remove_file(f"{DIRECTORY}/{LATEST}")
    else:
        overwrite(rank.files, f"{DIRECTORY}/{LATEST}", line)
    assert rank.restored() == CheckpointName(0, 3)
    assert len(rank.warnings) == 1
    rank.save(4)
    rank.warnings.clear()
    assert rank.restored() == CheckpointName(0, 4)
    assert rank.warnings == []


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors"])
@pytest.mark.parametrize("index", [*range(0, 330, 7), -1, -2, -3, -10])
def test_a_flipped_bit_is_seen_and_the_one_before_is_taken(file: str, index: int) -> None:
    rank = Rank()
    rank.save(2, 3)
    path = f"{DIRECTORY}/step_0000000003.g0000/{file}"
    content = rank.files.tree()[path]
    index %= len(content)
    overwrite(rank.files, path, flipped(content, index, bit=index % 8))
    assert rank.restored() == CheckpointName(0, 2)
    assert len(rank.warnings) == 2
    assert file in rank.warnings[0]


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors"])
@pytest.mark.parametrize("kept", [0, 1, 17, 200, -1])
def test_a_file_that_was_cut_short_or_grew_is_seen(file: str, kept: int) -> None:
    rank = Rank()
    rank.save(2, 3)
    path = f"{DIRECTORY}/step_0000000003.g0000/{file}"
    content = rank.files.tree()[path]
    for changed in (content[:kept], content + b"\0", content + content):
        overwrite(rank.files, path, changed)
        assert rank.restored() == CheckpointName(0, 2)


def test_a_checkpoint_under_another_ones_name_is_damaged() -> None:
    rank = Rank()
    rank.save(2)
    rank.files.rename(f"{DIRECTORY}/step_0000000002.g0000", f"{DIRECTORY}/step_0000000009.g0000")
    with pytest.raises(CheckpointDamaged, match="another directory"):
        rank.vault.restore()


def test_when_none_is_intact_the_work_is_not_thrown_away_silently() -> None:
    rank = Rank()
    rank.save(2, 3)
    for step in (2, 3):
        overwrite(rank.files, f"{DIRECTORY}/step_{step:010d}.g0000/manifest.json", b"{}")
    before = rank.files.tree()
    with pytest.raises(CheckpointDamaged, match="no checkpoint in"):
        rank.vault.restore()
    assert rank.files.tree() == before


def test_damaged_ones_do_not_push_the_last_intact_one_out() -> None:
    first = Rank(keep_last=3)
    first.save(1, 2, 3)
    for step in (2, 3):
        overwrite(first.files, f"{DIRECTORY}/step_{step:010d}.g0000/state.safetensors", b"")
    second = Rank(first.files, owner(generation=1), keep_last=2)
    assert second.restored() == CheckpointName(0, 1)
    second.save(2)
    assert "step_0000000001.g0000" in second.on_disk()
    second.save(3)
    assert second.on_disk() == [LATEST, "step_0000000002.g0001", "step_0000000003.g0001"]


def test_leftovers_of_dead_saves_are_swept_and_strangers_are_left() -> None:
    rank = Rank()
    rank.save(1)
    strangers = [f"{DIRECTORY}/{name}" for name in ("notes.tmp", ".step_x.tmp", "step_1")]
    newer = f"{DIRECTORY}/.step_0000000002.g0009.tmp"
    dead = f"{DIRECTORY}/.step_0000000002.g0000.tmp"
    for path in (*strangers, newer, dead):
        rank.files.make_directory(path)
    overwriteable = f"{DIRECTORY}/.LATEST.g0000.tmp"
    rank.files.close(rank.files.create(overwriteable))
    rank.files.close(rank.files.create(f"{dead}/state.safetensors"))
    successor = Rank(rank.files, owner(generation=1))
    successor.save(2)
    left = {name for name in successor.on_disk() if "tmp" in name or name == "step_1"}
    assert left == {"notes.tmp", ".step_x.tmp", "step_1", ".step_0000000002.g0009.tmp"}


UNSUPPORTED = {
    "an object array": {"a": np.array([object()])},
    "a structured array": {"a": np.zeros(2, dtype=[("x", "f4")])},
    "a big-endian array": {"a": np.zeros(2, dtype=">f4")},
    "a complex array": {"a": np.zeros(2, dtype=complex)},
    "text in an array": {"a": np.array(["a"])},
    "a masked array": {"a": np.ma.masked_array([1, 2], [True, False])},
    "an array below the top": {"a": {"b": np.zeros(2)}},
    "bytes": {"a": b"x"},
    "a set": {"a": {1}},
    "a key that is no string": {"a": {1: 2}},
    "a name that is no string": {1: 2},
    "a reserved key": {"a": {"__float__": "nan"}},
    "a reserved name": {"__metadata__": np.zeros(2)},
    "half a surrogate pair": {"a": "\ud800"},
    "an int of ten thousand digits": {"a": 10**10_000},
    "too much for a manifest": {"a": "x" * (17 << 20)},
    "a function": {"a": len},
}


@pytest.mark.parametrize("bad", UNSUPPORTED.values(), ids=list(UNSUPPORTED))
def test_a_state_that_cannot_be_saved_is_refused_and_the_old_one_stays(
    bad: dict[str, object],
) -> None:
    rank = Rank()
    rank.save(1)
    before = rank.files.tree()
    with pytest.raises(UnsupportedState):
        rank.vault.save(2, position(2), bad)
    assert rank.files.tree() == before
    assert rank.restored() == CheckpointName(0, 1)


def test_what_cannot_be_saved_is_named_as_a_program_would_write_it() -> None:
    words = r'^state\["a"\]\["b"\]\[1\] is of the type object, '
    with pytest.raises(UnsupportedState, match=words):
        Rank().vault.save(1, position(1), {"a": {"b": [0, object()]}})


def test_a_state_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UnsupportedState, match="contains itself"):
        Rank().vault.save(1, position(1), {"loop": loop})


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_whichever_operation_fails_the_old_checkpoint_stays_and_the_failure_is_told(
    number: int,
) -> None:
    calm = Rank()
    calm.save(1, 2)
    start = len(calm.files.operations)
    calm.save(3)
    for failing in range(start, len(calm.files.operations)):
        files = MemoryFileSystem(errors={failing: number})
        rank = Rank(files)
        rank.save(1, 2)
        acknowledged = CheckpointName(0, 2)
        try:
            rank.save(3)
        except CheckpointFailed:
            pass
        else:
            # Too late to matter, and said: only the deletion of an old one went wrong. Or LATEST
            # could not be read before it was replaced.
            acknowledged = CheckpointName(0, 3)
            assert rank.warnings or files.operations[failing].name == "read"
        assert no_descriptor_was_trusted_after_its_failure(files)
        assert Rank(files).restored() >= acknowledged
        # And when the disk is well again, so are we.
        rank.save(4)
        again = Rank(files)
        assert again.restored() == CheckpointName(0, 4)
        assert again.warnings == []
        rank.vault.close()
        assert not [name for name in rank.on_disk() if name.endswith(".tmp")] or rank.warnings


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_failure_in_the_very_first_save_leaves_a_way_to_begin(number: int) -> None:
    calm = Rank()
    calm.save(1)
    for failing in range(len(calm.files.operations)):
        files = MemoryFileSystem(errors={failing: number})
        rank = Rank(files)
        try:
            rank.save(1)
        except CheckpointError:
            assert rank.restored() in (None, CheckpointName(0, 1))
        rank.save(2)
        assert Rank(files).restored() == CheckpointName(0, 2)


def no_descriptor_was_trusted_after_its_failure(files: MemoryFileSystem) -> bool:
    broken = set()
    for operation in files.operations:
        if operation.name == "fsync" and operation.arguments[0] in broken:
            return False
        if operation.error is not None and operation.name in ("write", "fsync"):
            broken.add(operation.arguments[0])
    return True


def test_a_file_whose_fsync_failed_is_removed_and_written_anew() -> None:
    calm = Rank()
    calm.save(1)
    fsyncs = [n for n, call in enumerate(calm.files.operations) if call.name == "fsync"]
    files = MemoryFileSystem(errors={fsyncs[0]: errno.EIO})
    rank = Rank(files)
    with pytest.raises(CheckpointFailed):
        rank.save(1)
    assert rank.on_disk() == []
    rank.save(1)
    assert rank.restored() == CheckpointName(0, 1)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_a_place_that_cannot_be_written_is_told_apart(number: int) -> None:
    files = MemoryFileSystem(errors=dict.fromkeys(range(100), number))
    with pytest.raises(CheckpointNotWritable, match="name another one"):
        Rank(files).save(1)


def test_short_writes_are_carried_on() -> None:
    rank = Rank(MemoryFileSystem(largest_write_bytes=13))
    rank.save(1)
    assert rank.restored() == CheckpointName(0, 1)


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


@dataclass
class Overtaken:
    """A reader's files, of a job that saves so often before the next manifest is read."""

    files: MemoryFileSystem
    saves: Iterator[Callable[[], None]]

    def read(self, path: str, limit_bytes: int) -> bytearray:
        if path.endswith(MANIFEST):
            next(self.saves, lambda: None)()
        return self.files.read(path, limit_bytes)

    def list_directory(self, path: str) -> list[str]:
        return self.files.list_directory(path)


def overtaken(rank: Rank, times: int, warnings: list[str]) -> Reader:
    """Return a reader, before each of whose first looks a rank saves thrice."""
    assert isinstance(rank.files, MemoryFileSystem)
    saves = (partial(rank.save, *range(first, first + 3)) for first in range(10, 10 + 3 * times, 3))
    files = Overtaken(rank.files, saves)
    return Reader(
        files=files, directory=rank.directory, rank=0, world_size=None, warn=warnings.append
    )


def test_a_reader_that_is_overtaken_by_the_job_looks_again() -> None:
    rank, warnings = Rank(), []
    rank.save(1, 2, 3)
    found = overtaken(rank, 2, warnings).newest()
    assert found is not None
    assert found.step == 15
    assert not warnings, "nothing was damaged"


def test_a_reader_that_is_always_overtaken_says_so() -> None:
    rank = Rank()
    rank.save(1, 2, 3)
    with pytest.raises(CheckpointDamaged, match="faster than it can be read"):
        overtaken(rank, 1000, []).newest()
