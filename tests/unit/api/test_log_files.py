"""One log file: opened without following links, its lines backwards, and how they are shown."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.logs import files as log_files
from api.logs.files import (
    LINE_LIMIT_BYTES,
    PIECE_BYTES,
    Line,
    decode,
    line_end_before,
    open_log,
    read_backwards,
    size_of,
)
from muster.contracts.paths import DataDir, JobFiles

PATCHED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def complete_size(path: Path) -> int:
    return line_end_before(path, size_of(path))


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = DataDir(tmp_path).job("job")
    files.logs.mkdir(parents=True)
    files.log(0, 0).write_text("a line\n")
    return files


def content(path: Path) -> bytes:
    descriptor = open_log(path)
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)


def test_open_log_accepts_a_linked_data_directory(files: JobFiles, tmp_path: Path) -> None:
    assert content(files.log(0, 0)) == b"a line\n"
    link = tmp_path / "link"
    link.symlink_to(files.root.parent)
    assert content(JobFiles(link / "job").log(0, 0)) == b"a line\n"


@pytest.mark.parametrize(
    "swapped", [lambda files: files.root, lambda files: files.logs, lambda files: files.log(0, 0)]
)
def test_open_log_does_not_follow_links_of_a_job(
    files: JobFiles, swapped: Callable[[JobFiles], Path]
) -> None:
    path = swapped(files)
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        open_log(files.log(0, 0))


@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo])
def test_open_log_refuses_what_is_not_a_file(files: JobFiles, put: Callable[[Path], None]) -> None:
    put(files.log(0, 1))
    with pytest.raises(OSError, match="not a regular file"):
        open_log(files.log(0, 1))


@pytest.fixture(params=[4, 32 * 1024])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log that is read in tiny blocks, and in blocks of the usual size."""
    monkeypatch.setattr(log_files, "BLOCK_BYTES", request.param)
    return tmp_path / "log"


def backwards(path: Path, begin: int = 0) -> list[Line]:
    found = list(read_backwards(path, path.stat().st_size, begin=begin))
    return [line for line in found if isinstance(line, Line)]


@PATCHED
@given(
    text=st.text("ab\n", max_size=60).map(str.encode),
    begin=st.integers(0, 60),
    piece_bytes=st.sampled_from([5, 9, PIECE_BYTES]),
)
def test_backwards_is_forwards_reversed(
    path: Path, text: bytes, begin: int, piece_bytes: int
) -> None:
    begin = min(begin, len(text))
    path.write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "PIECE_BYTES", piece_bytes)
        found = backwards(path, begin)[::-1]
        complete = complete_size(path)
    assert b"".join(text[line.start : line.end] for line in found) == text[begin:]
    assert [line.end for line in found][:-1] == [line.start for line in found][1:]
    assert all(0 < line.end - line.start <= piece_bytes for line in found)
    assert all(line.shown == text[line.start : line.end].removesuffix(b"\n") for line in found)
    assert all(b"\n" not in line.shown for line in found)
    if piece_bytes == PIECE_BYTES:
        assert len(found) == len(text[begin:].splitlines())
        assert complete == text.rfind(b"\n") + 1


def test_a_missing_file_has_no_complete_lines(path: Path) -> None:
    assert list(read_backwards(path, 0)) == []
    assert complete_size(path) == 0


@pytest.mark.parametrize("end", ["\nnext\n", ""])
def test_bytes_cut_off_a_long_line_are_counted(path: Path, end: str) -> None:
    path.write_text("x" * (LINE_LIMIT_BYTES + 7) + end)
    assert backwards(path)[-1].text == "x" * LINE_LIMIT_BYTES + " … [7 bytes cut]"


def test_a_line_without_end_is_read_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "PIECE_BYTES", 8)
    path.write_bytes(b"first\n" + bytes(range(65, 85)) + b"\nlast")
    found = [line.text for line in backwards(path)]
    assert found == ["last", "NOPQRST", "FGHIJKLM", "ABCDE", "first"]
    assert complete_size(path) == 27
    path.write_bytes(b"first\n" + b"x" * 20)
    assert complete_size(path) == 26, "pieces are complete lines"


def test_two_gigabytes_without_a_line_end_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log:
        log.truncate(2 << 30)
    taken: list[int] = []
    really = log_files.read

    def read(path: Path, start: int, count: int) -> bytes:
        taken.append(count)
        return really(path, start, count)

    monkeypatch.setattr(log_files, "read", read)
    assert complete_size(path) == 2 << 30
    last = next(read_backwards(path, 2 << 30))
    assert (last.start, last.end) == ((2 << 30) - PIECE_BYTES, 2 << 30)
    assert sum(taken) < 3 * PIECE_BYTES


def test_a_truncated_file_reads_to_its_start(path: Path) -> None:
    path.write_bytes(b"one\n")
    found = list(read_backwards(path, 100))
    assert (found[-1].start, found[0].end) == (0, 100)


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain\n", "plain"),
        (b"windows\r\n", "windows"),
        (b"10%\r20%\n", "10%\\r20%"),
        (b"\xff\n", "�"),
        (b"unfinished", "unfinished"),
        ("é\n".encode(), "é"),
    ],
)
def test_a_line_is_shown_without_control_of_the_terminal(path: Path, raw: bytes, text: str) -> None:
    path.write_bytes(raw)
    assert [line.text for line in backwards(path)] == [text]


@given(lines=st.lists(st.text("ab\r\xff", max_size=6).map(lambda line: line.encode("latin-1"))))
def test_many_lines_decode_as_each_does(lines: list[bytes]) -> None:
    assert decode(b"\n".join(lines)) == "\n".join(map(decode, lines))


@pytest.mark.slow
@PATCHED
@given(
    raw=st.text("ab\r\n", max_size=60).map(str.encode),
    text=st.sampled_from(["a", "bb", "ab", "\\r", "b\\", "�", "\n", ""]),
)
def test_skipped_lines_do_not_contain_the_text(path: Path, raw: bytes, text: str) -> None:
    path.write_bytes(raw)
    searched = list(read_backwards(path, len(raw), text))
    assert [one.end for one in searched][1:] == [one.start for one in searched][:-1]
    found = [line for line in searched if isinstance(line, Line) and text in line.text]
    assert found == [line for line in backwards(path) if text in line.text]
