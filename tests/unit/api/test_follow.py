"""Following the logs of a job: order, fairness, and going on from any position."""

from pathlib import Path

import pytest

from api.logs import follow
from api.logs.follow import Batch, JobFollower
from api.logs.position import parse_position
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
    monkeypatch.setattr(follow, "READ_BYTES", 10)


def batches(follower: JobFollower) -> list[Batch]:
    found = []
    while batch := follower.next_batch(over):
        found.append(batch)
    return found


def lines(found: list[Batch]) -> list[str]:
    return [line for batch in found for line in batch.lines]


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
        position = parse_position(batch.position)
        assert position is not None
        rest = lines(batches(JobFollower(files, None, position)))
        assert by_rank(lines(found[: place + 1]) + rest) == by_rank(everything)


@pytest.mark.usefixtures("tiny_batches")
def test_a_rank_that_writes_much_does_not_silence_the_other(files: JobFiles) -> None:
    for rank in (0, 1):
        files.log(rank, 0).write_text("line\n" * COUNT)
    batch = JobFollower(files, None, {}).next_batch(alive)
    assert batch is not None
    assert list(batch.lines[:2]) == ["[rank 0] line", "[rank 1] line"]


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
    assert list(batch.lines) == ["[rank 0] beginning"]
    files.log(0, 1).write_text("")
    batch = follower.next_batch(alive)
    assert batch is not None
    assert list(batch.lines) == ["[rank 0] next"]
    assert follower.next_batch(alive) is None
    assert follower.position == "0.0:14"


def test_a_place_in_the_logs_of_an_earlier_job_means_the_beginning(files: JobFiles) -> None:
    files.log(0, 0).write_text("new\n")
    for position in ({0: (0, 999)}, {0: (7, 0)}):
        assert lines(batches(JobFollower(files, 0, position))) == ["new"]


def test_a_job_without_logs_has_nothing_to_say(tmp_path: Path) -> None:
    follower = JobFollower(JobFiles(tmp_path / "nowhere"), None, {})
    assert follower.next_batch(over) is None
