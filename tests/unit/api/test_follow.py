"""Following the logs of a job: order, fairness, and going on from any position."""

from pathlib import Path

import pytest

from api.logs import follow
from api.logs import lines as lines_of_files
from api.logs.follow import Batch, JobFollower
from api.logs.position import format_position
from muster.contracts.layout import TIME_MARK, JobFiles, LogName

COUNT = 20


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
    monkeypatch.setattr(lines_of_files, "BLOCK_BYTES", 10)


def batches(follower: JobFollower) -> list[Batch]:
    found = []
    while batch := follower.next_batch(over):
        found.append(batch)
    return found


def lines(found: list[Batch]) -> list[str]:
    return [line for batch in found for line in batch.text.split("\n")]


def by_rank(found: list[str]) -> list[list[str]]:
    return [[line for line in found if line.startswith(f"[rank {rank}]")] for rank in (0, 1)]


@pytest.mark.usefixtures("tiny_batches")
def test_every_position_leads_to_exactly_the_rest(files: JobFiles) -> None:
    for rank, incarnation in [(0, 0), (0, 1), (1, 0), (1, 3)]:
        text = "".join(f"{incarnation}-{number}\n" for number in range(COUNT))
        files.log(rank, incarnation).write_text(text + "unfinished")
    found = batches(JobFollower(files, None, {}))
    everything = lines(found)
    assert len(everything) == 4 * (COUNT + 1)
    for place, batch in enumerate(found):
        rest = lines(batches(JobFollower(files, None, batch.position)))
        assert by_rank(lines(found[: place + 1]) + rest) == by_rank(everything)


@pytest.mark.usefixtures("tiny_batches")
def test_between_any_two_positions_lies_what_was_handed_out_between_them(files: JobFiles) -> None:
    for rank, incarnation in [(0, 0), (0, 1), (1, 0)]:
        text = "".join(f"{incarnation}-{number}\n" for number in range(COUNT))
        files.log(rank, incarnation).write_text(text + "unfinished")
    found = batches(JobFollower(files, None, {}))
    for first in range(0, len(found), 5):
        for last in range(first, len(found), 7):
            follower = JobFollower(files, None, found[first].position, found[last].position)
            expected = by_rank(lines(found[first + 1 : last + 1]))
            assert by_rank(lines(batches(follower))) == expected
            assert not follower.is_ahead


def test_who_is_ahead_of_a_position_gets_nothing_up_to_there(files: JobFiles) -> None:
    files.log(0, 0).write_text("0\n1\n2\n")
    files.log(0, 1).write_text("3\n")
    for place, until in (((0, 4), (0, 2)), ((1, 2), (0, 6))):
        follower = JobFollower(files, None, {0: place}, {0: until})
        assert follower.is_ahead
        assert follower.next_batch(over) is None
        assert follower.position == {0: place}


@pytest.mark.usefixtures("tiny_batches")
def test_a_rank_that_writes_much_does_not_silence_the_other(files: JobFiles) -> None:
    for rank in (0, 1):
        files.log(rank, 0).write_text("line\n" * COUNT)
    batch = JobFollower(files, None, {}).next_batch(alive)
    assert batch is not None
    assert lines([batch])[:4] == [f"[rank {rank}] line" for rank in (0, 0, 1, 1)]


def test_written_lines_come_in_the_order_of_time(files: JobFiles) -> None:
    for rank, times in ((0, (1, 4)), (1, (2, 3))):
        files.log(rank, 0).write_text("".join(f"{time}\n" for time in times))
        marks = [TIME_MARK.pack(2 * place, time) for place, time in enumerate(times, 1)]
        files.times(rank, 0).write_bytes(b"".join(marks))
    found = lines(batches(JobFollower(files, None, {})))
    assert [line[-1] for line in found] == ["1", "2", "3", "4"]


def test_an_unfinished_line_waits_for_its_end_or_that_of_its_writer(files: JobFiles) -> None:
    log = files.log(0, 0)
    log.write_text("begin")
    follower = JobFollower(files, None, {})
    assert follower.next_batch(alive) is None
    log.write_text("beginning\nnext")
    batch = follower.next_batch(alive)
    assert batch is not None
    assert lines([batch]) == ["[rank 0] beginning"]
    files.log(0, 1).write_text("")
    batch = follower.next_batch(alive)
    assert batch is not None
    assert lines([batch]) == ["[rank 0] next"]
    assert follower.next_batch(alive) is None
    assert format_position(follower.position) == "0.0:14"


def test_a_place_in_the_logs_of_an_earlier_job_means_the_beginning(files: JobFiles) -> None:
    files.log(0, 0).write_text("new\n")
    for position in ({0: (0, 999)}, {0: (7, 0)}):
        for until in (None, {0: (0, 4)}):
            follower = JobFollower(files, 0, position, until)
            assert not follower.is_ahead
            assert lines(batches(follower)) == ["new"]


def test_a_job_without_logs_has_nothing_to_say(tmp_path: Path) -> None:
    follower = JobFollower(JobFiles(tmp_path / "nowhere"), None, {})
    assert follower.next_batch(over) is None
