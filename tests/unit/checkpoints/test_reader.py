"""Damaged checkpoints are detected, and the previous one is restored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from muster.checkpoints.errors import CheckpointDamaged, CheckpointMismatch
from muster.checkpoints.local_store import LocalStore
from muster.checkpoints.manifest import LATEST, MANIFEST, CheckpointName
from muster.checkpoints.reader import CheckpointReader
from tests.support.checkpoint_ranks import DIRECTORY, Rank, flipped, owner
from tests.support.crash_simulator import MemoryFileSystem


def overwrite(files: MemoryFileSystem, path: str, content: bytes) -> None:
    """Replace the content of a file, like bit rot."""
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
def test_bad_latest_is_ignored_with_a_warning(line: bytes | None) -> None:
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


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut to {kept}": lambda old, kept=kept: old[:kept] for kept in (0, 1, 17, 200, -1)},
    **{
        f"a bit of byte {index}": lambda old, index=index: flipped(
            old, index % len(old), bit=index % 8
        )
        for index in [*range(0, 330, 7), -1, -2, -3, -10]
    },
    "longer": lambda old: old + b"\0",
    "twice": lambda old: old + old,
}


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors"])
def test_damaged_file_falls_back_to_previous_checkpoint(file: str) -> None:
    rank = Rank()
    rank.save(2, 3)
    path = f"{DIRECTORY}/step_0000000003.g0000/{file}"
    content = rank.files.tree()[path]
    for damage, change in DAMAGES.items():
        overwrite(rank.files, path, change(content))
        rank.warnings.clear()
        assert rank.restored() == CheckpointName(0, 2), damage
        assert len(rank.warnings) == 2
        assert file in rank.warnings[0]


def test_a_chosen_step_is_read_without_a_warning_or_fails_by_its_name() -> None:
    rank = Rank()
    rank.save(2, 3)
    reader = CheckpointReader(store=rank.store, rank=0, world_size=None, warn=rank.warnings.append)
    chosen = reader.newest_of_last_job(2)
    assert chosen is not None
    assert (chosen.name, rank.warnings) == (CheckpointName(0, 2), [])
    overwrite(rank.files, f"{DIRECTORY}/step_0000000002.g0000/state.safetensors", b"")
    with pytest.raises(CheckpointDamaged, match=r"step_0000000002\.g0000/state\.safetensors does"):
        reader.newest_of_last_job(2)
    with pytest.raises(CheckpointMismatch, match="no checkpoint of step 9 any more"):
        reader.newest_of_last_job(9)


def test_renamed_checkpoint_is_damaged() -> None:
    rank = Rank()
    rank.save(2)
    rank.files.rename(f"{DIRECTORY}/step_0000000002.g0000", f"{DIRECTORY}/step_0000000009.g0000")
    with pytest.raises(CheckpointDamaged, match="another directory"):
        rank.manager.restore()


def test_no_intact_checkpoint_raises_and_changes_nothing() -> None:
    rank = Rank()
    rank.save(2, 3)
    for step in (2, 3):
        overwrite(rank.files, f"{DIRECTORY}/step_{step:010d}.g0000/manifest.json", b"{}")
    before = rank.files.tree()
    with pytest.raises(CheckpointDamaged, match="no checkpoint in"):
        rank.manager.restore()
    assert rank.files.tree() == before


def test_retention_keeps_the_last_intact_checkpoint() -> None:
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


def test_interrupted_saves_are_removed_other_files_stay() -> None:
    rank = Rank()
    rank.save(1)
    kept = {"notes.tmp", ".step_x.tmp", "step_1", ".step_0000000002.g0009.tmp"}
    dead = ".step_0000000002.g0000.tmp"
    for name in (*kept, dead):
        rank.files.make_directory(f"{DIRECTORY}/{name}")
    for name in (".LATEST.g0000.tmp", f"{dead}/state.safetensors"):
        rank.files.close(rank.files.create(f"{DIRECTORY}/{name}"))
    successor = Rank(rank.files, owner(generation=1))
    successor.save(2)
    left = {name for name in successor.on_disk() if "tmp" in name or name == "step_1"}
    assert left == kept


class LatestFirst(LocalStore):
    """Yields LATEST without looking whether it exists, as an object store does."""

    def by_trust(self) -> Iterator[CheckpointName]:
        latest = self.latest()
        yield from [latest, *(name for name in super().by_trust() if name != latest)]


def test_latest_that_names_nothing_is_skipped() -> None:
    rank = Rank(kind=LatestFirst)
    rank.save(2, 3)
    overwrite(rank.files, f"{DIRECTORY}/{LATEST}", LATEST_LINES["pointing nowhere"])
    assert rank.restored() == CheckpointName(0, 3)
    assert "names step_0000000099.g0000" in rank.warnings[0]


@dataclass
class Racing:
    """A reader's file system on which the job saves before a manifest is read."""

    files: MemoryFileSystem
    saves: Iterator[Callable[[], None]]

    def read(self, path: str, limit_bytes: int) -> bytearray:
        if path.endswith(MANIFEST):
            next(self.saves, lambda: None)()
        return self.files.read(path, limit_bytes)

    def list_directory(self, path: str) -> list[str]:
        return self.files.list_directory(path)


def racing_reader(rank: Rank, times: int, warnings: list[str]) -> CheckpointReader:
    """Return a reader; the rank saves three times before each of its first reads."""
    assert isinstance(rank.files, MemoryFileSystem)
    saves = (partial(rank.save, *range(first, first + 3)) for first in range(10, 10 + 3 * times, 3))
    files = Racing(rank.files, saves)
    store = LocalStore(rank.directory, files=files)
    return CheckpointReader(store=store, rank=0, world_size=None, warn=warnings.append)


def test_reader_retries_when_the_job_deletes_meanwhile() -> None:
    rank, warnings = Rank(), []
    rank.save(1, 2, 3)
    found = racing_reader(rank, 2, warnings).newest()
    assert found is not None
    assert found.step == 15
    assert not warnings, "nothing was damaged"


def test_reader_gives_up_on_constant_changes() -> None:
    rank = Rank()
    rank.save(1, 2, 3)
    with pytest.raises(CheckpointDamaged, match="faster than it can be read"):
        racing_reader(rank, 1000, []).newest()
