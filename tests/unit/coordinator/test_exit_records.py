"""What a successor makes of ends that nobody had heard of: what it would have made of them live."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from stories import Story, beat, exited

from coordinator.exit_records import unheard_ends
from coordinator.snapshot import JobSnapshot
from muster.contracts.endings import RetryClass
from muster.contracts.exit_record import ExitRecord, encode_exit_record
from muster.contracts.job import Reason
from muster.contracts.layout import JobFiles
from muster.contracts.messages import RankExited, RankMessage, RankSaid, Refused
from muster.exit_records import write_own_account

REFUSED = Refused(reason=Reason.INVALID_PROGRAM, message="there is no such program")


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = JobFiles(tmp_path)
    files.exits.mkdir(parents=True)
    return files


def job() -> JobSnapshot:
    return Story.running(world_size=2).job


def record(said: Sequence[RankMessage], end: RankExited, pid: int) -> ExitRecord:
    words = tuple(RankSaid(rank=1, incarnation=0, message=message) for message in said)
    return ExitRecord(pid=pid, at="", said=words, exited=end)


def write(files: JobFiles, said: Sequence[RankMessage], end: RankExited, pid: int) -> None:
    files.exit_record(1, 0).write_bytes(encode_exit_record(record(said, end, pid)))


def account(files: JobFiles, said: Sequence[RankMessage], end: RankExited, pid: int) -> None:
    write_own_account(files, record(said, end, pid))


def pid_of(snapshot: JobSnapshot, rank: int) -> int:
    identity = snapshot.ranks[rank].identity
    assert identity is not None
    return identity.pid


@pytest.mark.parametrize(
    ("said", "end", "kind"),
    [
        ([], exited(1, 0, code=0), RetryClass.FINISHED),
        ([beat(stopping=True)], exited(1, 0, code=0), RetryClass.PREEMPTION),
        ([], exited(1, 0, signal=15), RetryClass.PREEMPTION),
        ([], exited(1, 0, code=64), RetryClass.DO_NOT_RETRY),
        ([], exited(1, 0, code=3), RetryClass.CRASH),
        ([], exited(1, 0, signal=9), RetryClass.CRASH),
        ([], exited(1, 0, signal=9, out_of_memory=True), RetryClass.OUT_OF_MEMORY),
        ([], exited(1, 0, code=1, lines=["MemoryError"]), RetryClass.OUT_OF_MEMORY),
        ([REFUSED], exited(1, 0, code=1), RetryClass.INVALID_PROGRAM),
    ],
)
def test_an_end_on_record_is_classed_like_one_that_is_told(
    files: JobFiles, said: Sequence[RankMessage], end: RankExited, kind: RetryClass
) -> None:
    story = Story(job())
    write(files, said, end, pid_of(story.job, 1))
    for message in unheard_ends(story.job, files):
        story.hears(message)
    ending = story.rank(1).ending
    assert ending is not None
    assert ending.retry_class is kind
    assert story.rank(0).is_alive
    assert list(unheard_ends(story.job, files)) == [], "it was heard"


def test_what_nobody_has_seen_is_left_open(files: JobFiles) -> None:
    assert list(unheard_ends(job(), files)) == []


def test_a_record_of_another_process_says_nothing(files: JobFiles) -> None:
    write(files, [], exited(1, 0, code=0), pid_of(job(), 1) + 1)
    assert list(unheard_ends(job(), files)) == []


@pytest.mark.parametrize("length", [0, 1, 20, -1])
def test_a_torn_record_says_nothing(files: JobFiles, length: int) -> None:
    write(files, [], exited(1, 0, code=0), pid_of(job(), 1))
    whole = files.exit_record(1, 0).read_bytes()
    files.exit_record(1, 0).write_bytes(whole[:length])
    assert list(unheard_ends(job(), files)) == []


def test_where_no_agent_saw_an_end_the_process_speaks_for_itself(files: JobFiles) -> None:
    snapshot = job()
    account(files, [beat(step=9)], exited(1, 0, code=0), pid_of(snapshot, 1))
    said, end = unheard_ends(snapshot, files)
    assert isinstance(said, RankSaid)
    assert (said.message, end) == (beat(step=9), exited(1, 0, code=0))


def test_an_agent_that_saw_an_end_knows_better_than_the_process(files: JobFiles) -> None:
    snapshot = job()
    account(files, [], exited(1, 0, code=0), pid_of(snapshot, 1))
    write(files, [], exited(1, 0, signal=9), pid_of(snapshot, 1))
    assert list(unheard_ends(snapshot, files)) == [exited(1, 0, signal=9)]


def test_of_a_rank_that_was_seen_to_live_the_next_agent_tells(files: JobFiles) -> None:
    snapshot = job()
    account(files, [], exited(1, 0, code=0), pid_of(snapshot, 1))
    assert list(unheard_ends(snapshot, files, living={1})) == []
