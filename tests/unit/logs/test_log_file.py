"""One log: opened without following links, its lines backwards, and when they were written."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.contracts.settings.paths import TIME_MARK, DataDir, JobFiles, LogName
from muster.logs import log_file
from muster.logs.log_file import PIECE_BYTES, LogFile, TimeIndex, open_log
from muster.logs.source import Lines

PATCHED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = DataDir(tmp_path).job("job")
    files.logs.mkdir(parents=True)
    files.log(0, 0).write_text("a line\n")
    return files


def content(files: JobFiles) -> bytes:
    return LogFile(files, LogName(0, 0)).read(0, 100)


def test_a_log_is_read_in_a_linked_data_directory(files: JobFiles, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(files.root.parent)
    assert content(JobFiles(link / "job")) == content(files) == b"a line\n"


@pytest.mark.parametrize(
    "swapped", [lambda files: files.root, lambda files: files.logs, lambda files: files.log(0, 0)]
)
def test_links_of_a_job_are_not_followed(
    files: JobFiles, swapped: Callable[[JobFiles], Path]
) -> None:
    path = swapped(files)
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)
    assert content(files) == b""


@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo])
def test_open_log_refuses_what_is_not_a_file(files: JobFiles, put: Callable[[Path], None]) -> None:
    put(files.log(0, 1))
    with pytest.raises(OSError, match="not a regular file"):
        open_log(files.log(0, 1))


@pytest.fixture(params=[4, 32 * 1024])
def log(
    files: JobFiles, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> LogFile:
    """A log that is read in tiny blocks, or in blocks of the usual size."""
    monkeypatch.setattr(log_file, "BLOCK_BYTES", request.param)
    return LogFile(files, LogName(0, 0))


def backwards(log: LogFile, begin: int = 0, text: str = "") -> list[Lines]:
    return list(log.read_backwards(log.size(), begin, text))


def complete_size(log: LogFile) -> int:
    return log.line_end_before(log.size(), 0)


@pytest.mark.slow
@PATCHED
@given(
    text=st.text("ab\r\n", max_size=60).map(str.encode),
    begin=st.integers(0, 60),
    piece_bytes=st.sampled_from([5, 9, PIECE_BYTES]),
)
def test_backwards_is_forwards_reversed(
    files: JobFiles, log: LogFile, text: bytes, begin: int, piece_bytes: int
) -> None:
    begin = min(begin, len(text))
    files.log(0, 0).write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_file, "PIECE_BYTES", piece_bytes)
        patch.setattr(log_file, "BLOCK_BYTES", min(log_file.BLOCK_BYTES, piece_bytes))
        found = backwards(log, begin)[::-1]
        complete = complete_size(log)
    assert b"".join(text[line.start : line.end] for line in found) == text[begin:]
    assert [line.end for line in found][:-1] == [line.start for line in found][1:]
    assert all(0 < line.end - line.start <= piece_bytes for line in found)
    assert all(line.raw == text[line.start : line.end].removesuffix(b"\n") for line in found)
    assert all(b"\n" not in line.raw for line in found)
    if piece_bytes == PIECE_BYTES:
        assert len(found) == len(text[begin:].replace(b"\r", b"c").splitlines())
        assert complete == text.rfind(b"\n") + 1


def test_a_line_without_end_is_read_in_pieces(
    files: JobFiles, log: LogFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "BLOCK_BYTES", 4)
    monkeypatch.setattr(log_file, "PIECE_BYTES", 8)
    files.log(0, 0).write_bytes(b"first\n" + bytes(range(65, 85)) + b"\nlast")
    found = [line.text for line in backwards(log)]
    assert found == ["last", "NOPQRST", "FGHIJKLM", "ABCDE", "first"]
    assert complete_size(log) == 27
    files.log(0, 0).write_bytes(b"first\n" + b"x" * 20)
    assert complete_size(log) == 26, "pieces are complete lines"


def test_two_gigabytes_without_a_line_end_are_not_read(
    files: JobFiles, log: LogFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files.log(0, 0).open("wb") as content:
        content.truncate(2 << 30)
    taken: list[int] = []
    really = log.read

    def read(start: int, count: int) -> bytes:
        taken.append(count)
        return really(start, count)

    monkeypatch.setattr(log, "read", read)
    assert complete_size(log) == 2 << 30
    last = next(log.read_backwards(2 << 30, 0))
    assert (last.start, last.end) == ((2 << 30) - PIECE_BYTES, 2 << 30)
    assert sum(taken) < 5 * PIECE_BYTES


def test_a_truncated_file_reads_to_its_start(log: LogFile) -> None:
    found = list(log.read_backwards(100, 0))
    assert (found[-1].start, found[0].end) == (0, 100)


@pytest.mark.slow
@PATCHED
@given(
    raw=st.text("ab\r\n", max_size=60).map(str.encode),
    text=st.sampled_from(["a", "bb", "ab", "\\r", "b\\", "\ufffd", "\n"]),
)
def test_lines_without_the_text_show_nothing(
    files: JobFiles, log: LogFile, raw: bytes, text: str
) -> None:
    files.log(0, 0).write_bytes(raw)
    searched = backwards(log, text=text)
    assert [one.end for one in searched][1:] == [one.start for one in searched][:-1]
    assert [one for one in searched if one.raw] == [
        one for one in backwards(log) if text in one.text
    ]


# Times

MARKS = [(10, 100), (10, 150), (25, 200), (40, 300)]


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    path = tmp_path / "times"
    path.write_bytes(b"".join(TIME_MARK.pack(*mark) for mark in MARKS) + b"torn")
    return path


@pytest.mark.parametrize(
    ("end", "expected"),
    [(1, 100), (10, 100), (11, 200), (25, 200), (26, 300), (40, 300), (41, None)],
)
def test_a_line_has_the_time_of_the_first_mark_after_it(
    marked: Path, end: int, expected: int | None
) -> None:
    assert TimeIndex(marked).at(end) == expected


def test_a_mark_that_is_added_later_is_found(tmp_path: Path) -> None:
    path = tmp_path / "times"
    index = TimeIndex(path)
    assert index.at(5) is None
    path.write_bytes(TIME_MARK.pack(10, 100))
    assert [index.at(5), index.at(10), index.at(11)] == [100, 100, None]


@pytest.mark.parametrize(
    ("micros", "size"), [(99, 0), (100, 10), (199, 10), (200, 25), (299, 25), (999, 40)]
)
def test_the_size_at_a_time_is_that_of_the_mark_before(
    marked: Path, micros: int, size: int
) -> None:
    assert TimeIndex(marked).size_at(micros) == size


def test_without_marks_the_size_is_unknown(tmp_path: Path) -> None:
    assert TimeIndex(tmp_path / "times").size_at(999) == 0


def test_lookups_in_any_order_give_the_same_times(marked: Path) -> None:
    marks = [(7 * number, number) for number in range(1, 1000)]
    marked.write_bytes(b"".join(TIME_MARK.pack(*mark) for mark in marks))
    index = TimeIndex(marked)
    for end in (1, 7, 8, 3500, 6993, 6994, 900, 901, 3000, 1, 6994):
        assert index.at(end) == (-(-end // 7) if end <= 6993 else None)
