"""Following one log: every line once, whatever happens to the file."""

import math
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.contracts.settings.paths import LOG_EPOCH_BYTES, TIME_MARK, JobFiles, LogName
from muster.host.files import KEEP_SIZE, PUNCH_HOLE, fallocate
from muster.logs import log_file
from muster.logs.follower import IDLE_READS, STATE_READS, FileFollower
from muster.logs.local import LocalLogs
from muster.logs.log_file import PIECE_BYTES, LogFile, TimeIndex
from muster.logs.source import GAP, LINE_LIMIT_BYTES, Lines
from tests.support.logs import JobLogs, rest_of

PATCHED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = JobFiles(tmp_path)
    files.logs.mkdir()
    return files


@pytest.fixture(params=[4, 32 * 1024])
def path(files: JobFiles, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log that is read in tiny blocks, or in blocks of the usual size."""
    monkeypatch.setattr(log_file, "BLOCK_BYTES", request.param)
    return files.log(0, 0)


def follow(path: Path, offset: int = 0, limit: float = math.inf) -> FileFollower:
    return FileFollower(LogFile(JobFiles(path.parent.parent), LogName(0, 0)), offset, limit)


def read_all(follower: FileFollower) -> list[Lines]:
    found = []
    while got := follower.read():
        found += got
    return found


def text(found: list[Lines]) -> str:
    return "\n".join(lines.text for lines in found)


@pytest.mark.slow
@PATCHED
@given(
    parts=st.lists(st.text("ab\n", max_size=12).map(str.encode), max_size=12),
    limit=st.one_of(st.just(1000), st.integers(0, 145)),
)
def test_each_complete_line_is_read_once(path: Path, parts: list[bytes], limit: int) -> None:
    path.unlink(missing_ok=True)
    follower = follow(path, 0, limit)
    found: list[Lines] = []
    written = b""
    for part in parts:
        written += part
        path.write_bytes(written)
        found += read_all(follower)
        assert follower.offset == written[:limit].rfind(b"\n") + 1
    found += follower.read(is_over=True)
    assert text(found) == written[:limit].decode().removesuffix("\n")
    assert follower.offset == min(limit, len(written))
    assert [one.start for one in found] == [0, *[one.end for one in found]][: len(found)]


@pytest.mark.slow
@given(parts=st.lists(st.tuples(st.text("ab\n", max_size=6), st.integers(0, 3)), max_size=9))
@PATCHED
def test_lines_come_together_if_they_have_one_time(
    files: JobFiles, parts: list[tuple[str, int]]
) -> None:
    for path in files.logs.iterdir():
        path.unlink()
    for micros, (part, times) in enumerate(parts):
        JobLogs(files).write(0, part, at_micros=micros if times else None)
    log = LogFile(files, LogName(0, 0))
    found = FileFollower(log, 0).read(is_over=True)
    assert [one.start for one in found] == [0, *[one.end for one in found]][: len(found)]
    index = TimeIndex(files.times(0, 0))
    for lines in found:
        ends = [at + 1 for at, byte in enumerate(log.read(0, lines.end)) if byte == ord("\n")]
        within = [end for end in (*ends, lines.end) if end > lines.start]
        assert {index.at(end) for end in within} == {lines.micros}


def test_a_missing_file_or_a_link_has_no_lines(path: Path) -> None:
    assert follow(path).read() == follow(path).read(is_over=True) == []
    secret = path.with_name("secret")
    secret.write_bytes(b"secret\n")
    path.symlink_to(secret)
    assert follow(path).read() == []


@pytest.mark.parametrize("new", ["new\n", "the first line\nand what follows\n", "the first\n"])
@pytest.mark.parametrize("over", [False, True])
def test_a_truncated_log_is_read_from_its_beginning(path: Path, new: str, *, over: bool) -> None:
    path.write_bytes(b"the first\n")
    follower = follow(path)
    assert text(read_all(follower)) == "the first"
    path.write_text(new)
    mark = TIME_MARK.pack(LOG_EPOCH_BYTES + len(new), 1)
    path.with_suffix(".times").write_bytes(mark)
    found = follower.read(is_over=True) if over else []
    found += [lines for _ in range(IDLE_READS) for lines in follower.read()]
    assert text(found) == f"{GAP.decode()}\n{new}".removesuffix("\n")
    assert follower.offset == LOG_EPOCH_BYTES + len(new)


def test_a_shorter_log_is_not_read_until_its_truncation_is_noted(path: Path) -> None:
    path.write_bytes(b"the first\n")
    follower = follow(path)
    read_all(follower)
    path.write_text("new\n")
    assert [follower.read() for _ in range(2 * IDLE_READS)] == [[]] * 2 * IDLE_READS


def test_a_reader_skips_lines_that_were_discarded(files: JobFiles) -> None:
    path = files.log(0, 0)
    path.write_text("".join(f"{number:07d}\n" for number in range(4096)))
    follower = follow(path, limit=80)
    assert text(read_all(follower))[-7:] == "0000009"
    with path.open("r+b") as log:
        fallocate(log.fileno(), KEEP_SIZE | PUNCH_HOLE, 0, 8192)
    for reader in (follower, follow(path, 80)):
        reader._limit = 32768  # noqa: SLF001
        assert text(read_all(reader)).startswith(f"{GAP.decode()}\n0001024\n0001025\n")


@pytest.mark.slow
@PATCHED
@given(written=st.text("ab\r\n", max_size=60).map(str.encode), again=st.integers(0, 6))
def test_a_long_line_comes_in_pieces_without_a_gap(
    path: Path, monkeypatch: pytest.MonkeyPatch, written: bytes, again: int
) -> None:
    monkeypatch.setattr(log_file, "BLOCK_BYTES", 4)
    monkeypatch.setattr(log_file, "PIECE_BYTES", 5)
    path.write_bytes(written)
    found = read_all(follow(path))
    # A second reader resumes after any chunk, as with Last-Event-ID.
    place = found[min(again, len(found)) - 1].end if found and again else 0
    later = follow(path, place)
    found = [one for one in found if one.end <= place] + read_all(later) + later.read(is_over=True)
    assert [one.start for one in found] == [0, *[one.end for one in found]][: len(found)]
    assert b"".join(written[one.start : one.end] for one in found) == written
    assert all(len(line) <= 5 for one in found for line in one.raw.split(b"\n"))
    assert sum(len(one.raw.replace(b"\n", b"")) for one in found) == len(written) - written.count(
        b"\n"
    )


def test_a_progress_bar_is_returned_now_and_then(path: Path) -> None:
    def write(content: bytes) -> list[str]:
        with path.open("ab") as log:
            log.write(content)
        return [one.text for _ in range(2 * STATE_READS) for one in follower.read()]

    follower = follow(path)
    assert write(b"begin\n\r 0%") == ["begin"], "it may not be complete"
    assert write(b"\r10%") == [" 0%"]
    assert write(b"") == []
    assert write(b"\r20%\r30%") == ["20%"]
    # A second reader resumes after any state, as with Last-Event-ID.
    assert text(follow(path, follower.offset).read(is_over=True)) == "30%"
    assert write(b"\r100%\nend\r") == ["100%", "end"]
    assert follower.offset == path.stat().st_size


def test_pieces_of_a_long_progress_bar_end_between_states(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "BLOCK_BYTES", 4)
    monkeypatch.setattr(log_file, "PIECE_BYTES", 8)
    path.write_bytes(b"\r10%\r20%\r30%\r40%\r50%\n")
    assert text(follow(path).read() + follow(path, 5).read()) == "10%\n30%"
    log = LogFile(JobFiles(path.parent.parent), LogName(0, 0))
    assert [one.text for one in log.read_backwards(21, 0)] == ["50%", "40%", "30%", "20%", "10%"]
    path.write_bytes(b"\r10%\r20%\r30%")
    assert log.line_end_before(12, 0) == 12, "pieces are complete lines"


def test_a_line_as_long_as_a_piece_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "BLOCK_BYTES", 4)
    monkeypatch.setattr(log_file, "PIECE_BYTES", 8)
    path.write_bytes(b"exactly8\nlonger than 8\n")
    assert text(read_all(follow(path))) == "exactly8\nlonger t\nhan 8"


def test_one_read_takes_a_piece_of_an_endless_line(files: JobFiles) -> None:
    path = files.log(0, 0)
    with path.open("wb") as log:
        log.write(b"\0")
        log.truncate(2 << 30)
    follower = follow(path)
    (piece,) = follower.read()
    assert (piece.start, piece.end) == (0, PIECE_BYTES)
    cut = PIECE_BYTES - LINE_LIMIT_BYTES
    assert piece.text == "\0" * LINE_LIMIT_BYTES + f" … [{cut} bytes cut]"
    assert follower.offset == PIECE_BYTES


def test_last_lines_of_another_host_come_before_the_next_attempt(files: JobFiles) -> None:
    logs = JobLogs(files)
    files.log_host(0, 0).symlink_to("b")
    logs.write(0, "one\n")
    logs.write(0, "three\n", attempt=1)
    follower = LocalLogs(files).follow(None, {})
    assert rest_of(follower) == ["0 one"]
    logs.write(0, "two")
    files.exits.mkdir(parents=True)
    files.exit_record(0, 0).touch()
    assert rest_of(follower) == ["0 two", "0 three"]


def test_a_lost_host_holds_up_no_reader(files: JobFiles) -> None:
    logs = JobLogs(files)
    files.log_host(0, 0).symlink_to("b")
    logs.write(0, "one\n")
    logs.write(0, "two\n", attempt=1)
    os.utime(files.log(0, 0), (0, 0))
    assert rest_of(LocalLogs(files).follow(None, {})) == ["0 one", "0 two"]
