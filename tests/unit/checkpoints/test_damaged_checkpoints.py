"""What is damaged, torn or overtaken is seen, and the one before is taken."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
from vaults import DIRECTORY, Rank, flipped, owner

from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.memory import MemoryFileSystem
from muster.checkpoints.names import LATEST, MANIFEST, CheckpointName
from muster.checkpoints.reader import Reader


def overwrite(files: MemoryFileSystem, path: str, content: bytes) -> None:
    """Put other bytes into a file, as bit rot or a stray process would."""
    files.remove_file(path)
    descriptor = files.create(path)
    files.write(descriptor, content)
    files.close(descriptor)


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
