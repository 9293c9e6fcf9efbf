"""Following logs: every line once, in order, from any position."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.logs import files as log_files
from api.logs import follow
from api.logs.files import GAP, LINE_LIMIT_BYTES, PIECE_BYTES, Position
from api.logs.follow import IDLE_READS, Chunk, FileFollower, JobFollower
from muster.contracts.paths import LOG_EPOCH_BYTES, TIME_MARK, JobFiles, LogName
from worker.log_index import KEEP_SIZE, PUNCH_HOLE, fallocate

COUNT = 20

PATCHED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def over(_name: LogName) -> bool:
    return True


def alive(_name: LogName) -> bool:
    return False


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    job = JobFiles(tmp_path)
    job.logs.mkdir()
    return job


@pytest.fixture
def tiny_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "BATCH_BYTES", 30)
    monkeypatch.setattr(log_files, "BLOCK_BYTES", 10)


def batches(follower: JobFollower) -> list[tuple[str, Position]]:
    """Return the rest, each text with the position after it."""
    found = []
    while text := follower.next_batch(over):
        found.append((text, follower.position))
    return found


def lines(found: list[tuple[str, Position]]) -> list[str]:
    return [line for text, _ in found for line in text.split("\n")]


def next_lines(follower: JobFollower) -> list[str]:
    text = follower.next_batch(alive)
    return [] if text is None else text.split("\n")


def by_rank(found: list[str]) -> list[list[str]]:
    return [[line for line in found if line.startswith(f"[rank {rank}]")] for rank in (0, 1)]


@pytest.mark.usefixtures("tiny_batches")
def test_every_position_resumes_with_exactly_the_rest(files: JobFiles) -> None:
    for rank, attempt in [(0, 0), (0, 1), (1, 0), (1, 3)]:
        text = "".join(f"{attempt}-{number}\n" for number in range(COUNT))
        files.log(rank, attempt).write_text(text + "unfinished")
    found = batches(JobFollower(files, None, {}))
    everything = lines(found)
    assert len(everything) == 4 * (COUNT + 1)
    for place, (_, position) in enumerate(found):
        rest = lines(batches(JobFollower(files, None, position)))
        assert by_rank(lines(found[: place + 1]) + rest) == by_rank(everything)
    for first in range(0, len(found), 5):
        for last in range(first, len(found), 7):
            follower = JobFollower(files, None, found[first][1], found[last][1])
            expected = by_rank(lines(found[first + 1 : last + 1]))
            assert by_rank(lines(batches(follower))) == expected
            assert not follower.is_ahead


@pytest.mark.parametrize(("place", "until"), [((0, 4), (0, 2)), ((1, 2), (0, 6))])
def test_a_reader_ahead_of_its_limit_gets_nothing(
    files: JobFiles, place: tuple[int, int], until: tuple[int, int]
) -> None:
    files.log(0, 0).write_text("0\n1\n2\n")
    files.log(0, 1).write_text("3\n")
    follower = JobFollower(files, None, {0: place}, {0: until})
    assert follower.is_ahead
    assert follower.next_batch(over) is None
    assert follower.position == {0: place}


@pytest.mark.usefixtures("tiny_batches")
def test_a_fast_rank_does_not_hold_up_another(files: JobFiles) -> None:
    for rank in (0, 1):
        files.log(rank, 0).write_text("line\n" * COUNT)
    found = next_lines(JobFollower(files, None, {}))
    assert found[:4] == [f"[rank {rank}] line" for rank in (0, 0, 1, 1)]


def test_lines_of_several_ranks_are_merged_by_time(files: JobFiles) -> None:
    for rank, times in ((0, (1, 4)), (1, (2, 3))):
        files.log(rank, 0).write_text("".join(f"{time}\n" for time in times))
        marks = [TIME_MARK.pack(2 * place, time) for place, time in enumerate(times, 1)]
        files.times(rank, 0).write_bytes(b"".join(marks))
    found = lines(batches(JobFollower(files, None, {})))
    assert [line[-1] for line in found] == ["1", "2", "3", "4"]


def test_an_unfinished_line_waits_until_its_log_is_over(files: JobFiles) -> None:
    log = files.log(0, 0)
    log.write_text("begin")
    follower = JobFollower(files, None, {})
    assert next_lines(follower) == []
    log.write_text("beginning\nnext")
    assert next_lines(follower) == ["[rank 0] beginning"]
    files.log(0, 1).write_text("")
    assert next_lines(follower) == ["[rank 0] next"]
    assert next_lines(follower) == []
    assert follower.position == {0: (0, 14)}


@pytest.mark.parametrize(("place", "before"), [((0, 999), [GAP.decode()]), ((7, 0), [])])
@pytest.mark.parametrize("until", [None, {0: (0, 4)}])
def test_a_place_that_does_not_exist_means_the_beginning(
    files: JobFiles,
    place: tuple[int, int],
    before: list[str],
    until: dict[int, tuple[int, int]] | None,
) -> None:
    files.log(0, 0).write_text("new\n")
    follower = JobFollower(files, 0, {0: place}, until)
    assert not follower.is_ahead
    assert lines(batches(follower)) == [*before, "new"]


def test_a_job_without_logs_has_no_lines(tmp_path: Path) -> None:
    follower = JobFollower(JobFiles(tmp_path / "nowhere"), None, {})
    assert follower.next_batch(over) is None


@pytest.fixture(params=[4, 32 * 1024])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log that is read in tiny blocks, and in blocks of the usual size."""
    monkeypatch.setattr(log_files, "BLOCK_BYTES", request.param)
    return tmp_path / "log"


def read_all(follower: FileFollower) -> list[Chunk]:
    found = []
    while got := follower.read():
        found += got
    return found


def text(found: list[Chunk]) -> str:
    return "\n".join(chunk.text for chunk in found)


@pytest.mark.slow
@PATCHED
@given(
    parts=st.lists(st.text("ab\n", max_size=12).map(str.encode), max_size=12),
    limit=st.one_of(st.just(1000), st.integers(0, 145)),
)
def test_each_complete_line_is_read_once(path: Path, parts: list[bytes], limit: int) -> None:
    path.unlink(missing_ok=True)
    follower = FileFollower(path, 0, limit)
    found: list[Chunk] = []
    written = b""
    for part in parts:
        written += part
        path.write_bytes(written)
        found += read_all(follower)
        assert follower.offset == written[:limit].rfind(b"\n") + 1
    found += follower.read_rest()
    assert text(found) == written[:limit].decode().removesuffix("\n")
    assert follower.offset == min(limit, len(written))
    assert [one.start for one in found] == [0, *[one.end for one in found]][: len(found)]


@given(written=st.text("ab\n", min_size=1, max_size=20).map(str.encode), place=st.integers(0, 25))
def test_a_chunk_is_split_between_lines(written: bytes, place: int) -> None:
    whole = Chunk(start=5, end=6 + len(written), raw=written)
    place = max(place, whole.first_end)
    first, rest = whole.split(place)
    assert first.end <= place or rest is None
    assert first.first_end == whole.first_end
    assert (first.raw + b"\n" + rest.raw if rest else first.raw) == written
    if rest is not None:
        assert (first.start, first.end, rest.end) == (5, rest.start, whole.end)
        assert rest.first_end > place


def test_a_missing_file_or_a_link_has_no_lines(path: Path) -> None:
    assert FileFollower(path, 0).read() == FileFollower(path, 0).read_rest() == []
    secret = path.with_name("secret")
    secret.write_bytes(b"secret\n")
    path.symlink_to(secret)
    assert FileFollower(path, 0).read() == []


@pytest.mark.parametrize("new", ["new\n", "the first line\nand what follows\n", "the first\n"])
@pytest.mark.parametrize("over", [False, True])
def test_a_truncated_log_is_read_from_its_beginning(path: Path, new: str, *, over: bool) -> None:
    path.write_bytes(b"the first\n")
    follower = FileFollower(path, 0)
    assert text(read_all(follower)) == "the first"
    path.write_text(new)
    mark = TIME_MARK.pack(LOG_EPOCH_BYTES + len(new), 1)
    path.with_suffix(".times").write_bytes(mark)
    found = follower.read_rest() if over else []
    found += [chunk for _ in range(IDLE_READS) for chunk in follower.read()]
    assert text(found) == f"{GAP.decode()}\n{new}".removesuffix("\n")
    assert follower.offset == LOG_EPOCH_BYTES + len(new)


def test_a_shorter_log_is_not_read_until_its_truncation_is_noted(path: Path) -> None:
    path.write_bytes(b"the first\n")
    follower = FileFollower(path, 0)
    read_all(follower)
    path.write_text("new\n")
    assert [follower.read() for _ in range(2 * IDLE_READS)] == [[]] * 2 * IDLE_READS


def test_a_reader_skips_lines_that_were_discarded(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"{number:07d}\n" for number in range(4096)))
    follower = FileFollower(path, 0, limit=80)
    assert text(read_all(follower))[-7:] == "0000009"
    with path.open("r+b") as log:
        fallocate(log.fileno(), KEEP_SIZE | PUNCH_HOLE, 0, 8192)
    for reader in (follower, FileFollower(path, 80)):
        reader._limit = 32768  # noqa: SLF001
        assert text(read_all(reader)).startswith(f"{GAP.decode()}\n0001024\n0001025\n")


def test_bytes_cut_off_a_long_line_are_counted(path: Path) -> None:
    path.write_bytes(b"first\n" + b"x" * (LINE_LIMIT_BYTES + 7) + b"\nnext\n")
    found = read_all(FileFollower(path, 0))
    assert text(found) == "first\n" + "x" * LINE_LIMIT_BYTES + " … [7 bytes cut]\nnext"
    assert found[-1].end == path.stat().st_size


@pytest.mark.slow
@PATCHED
@given(written=st.text("ab\n", max_size=60).map(str.encode), again=st.integers(0, 6))
def test_a_long_line_comes_in_pieces_without_a_gap(
    path: Path, monkeypatch: pytest.MonkeyPatch, written: bytes, again: int
) -> None:
    monkeypatch.setattr(log_files, "PIECE_BYTES", 5)
    path.write_bytes(written)
    found = read_all(FileFollower(path, 0))
    # A second reader resumes after any chunk, as with Last-Event-ID.
    place = found[min(again, len(found)) - 1].end if found and again else 0
    later = FileFollower(path, place)
    found = [one for one in found if one.end <= place] + read_all(later) + later.read_rest()
    assert [one.start for one in found] == [0, *[one.end for one in found]][: len(found)]
    assert b"".join(written[one.start : one.end] for one in found) == written
    assert all(len(line) <= 5 for one in found for line in one.raw.split(b"\n"))
    assert sum(len(one.raw.replace(b"\n", b"")) for one in found) == len(written) - written.count(
        b"\n"
    )


def test_a_line_as_long_as_a_piece_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "PIECE_BYTES", 8)
    path.write_bytes(b"exactly8\nlonger than 8\n")
    assert text(read_all(FileFollower(path, 0))) == "exactly8\nlonger t\nhan 8"


def test_one_read_takes_a_piece_of_an_endless_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log:
        log.write(b"\0")
        log.truncate(2 << 30)
    follower = FileFollower(path, 0)
    (piece,) = follower.read()
    assert (piece.start, piece.end) == (0, PIECE_BYTES)
    cut = PIECE_BYTES - LINE_LIMIT_BYTES
    assert piece.text == "\0" * LINE_LIMIT_BYTES + f" … [{cut} bytes cut]"
    assert follower.offset == PIECE_BYTES
