import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.contracts.settings.paths import LOG_EPOCH_BYTES, TIME_MARK
from worker.ranks.log_index import LogIndex


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "logs" / "a.log", tmp_path / "logs" / "a.times"


@pytest.fixture
def index(paths: tuple[Path, Path]) -> Iterator[LogIndex]:
    index = LogIndex(*paths)
    yield index
    index.close()


def entries(paths: tuple[Path, Path]) -> list[tuple[int, int]]:
    return list(TIME_MARK.iter_unpack(paths[1].read_bytes()))


def test_an_entry_is_written_only_when_the_log_has_grown(
    index: LogIndex, paths: tuple[Path, Path]
) -> None:
    index.note(1.0)
    os.write(index.descriptor, b"abc\n")
    index.note(1.5)
    index.note(2.0)
    os.write(index.descriptor, b"de")
    index.note(2.25)
    assert entries(paths) == [(4, 1_500_000), (6, 2_250_000)]


def test_the_next_agent_appends_to_log_and_index(index: LogIndex, paths: tuple[Path, Path]) -> None:
    os.write(index.descriptor, b"abc\n")
    index.note(1.0)
    with paths[1].open("ab") as times:
        times.write(b"incomplete")
    successor = LogIndex(*paths)
    successor.note(2.0)
    os.write(successor.descriptor, b"d")
    successor.note(3.0)
    successor.close()
    assert entries(paths) == [(4, 1_000_000), (5, 3_000_000)]
    assert index.last_lines() == ("abc", "d")


@pytest.mark.parametrize("after", ["", "echo more than it had before", "echo abc"])
def test_a_truncation_by_the_program_is_noted_once(
    index: LogIndex, paths: tuple[Path, Path], after: str
) -> None:
    script = f"echo abc > /dev/stderr; {after}"
    os.write(index.descriptor, b"abc\n")
    assert not index.note(1.0)
    found = []
    for seconds in (2.0, 3.0):
        subprocess.run(
            ["/bin/sh", "-c", script], stdout=index.descriptor, stderr=index.descriptor, check=True
        )
        found.append(index.note(seconds))
    assert found == [True, False]
    size = paths[0].stat().st_size
    assert entries(paths)[1:] == [
        (number * LOG_EPOCH_BYTES + size, (1 + number) * 1_000_000) for number in (1, 2)
    ]
    assert not LogIndex(*paths).note(4.0), "the next agent knows it"


def test_a_log_shortened_without_an_agent_is_noted(
    index: LogIndex, paths: tuple[Path, Path]
) -> None:
    os.write(index.descriptor, b"abc\n")
    index.note(1.0)
    paths[0].write_bytes(b"x\n")
    assert LogIndex(*paths).note(2.0)


def test_log_and_index_are_readable_by_their_owner_only(
    index: LogIndex, paths: tuple[Path, Path]
) -> None:
    assert os.fstat(index.descriptor).st_mode & 0o077 == 0
    assert paths[1].stat().st_mode & 0o077 == 0


def test_a_failed_open_leaks_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "times").mkdir()
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
    with pytest.raises(IsADirectoryError):
        LogIndex(tmp_path / "log", tmp_path / "times")
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
