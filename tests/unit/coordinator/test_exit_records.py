"""Ends that were recorded but never reported are treated like reported ones."""

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from coordinator.decide.state.job import JobSnapshot
from coordinator.persistence import Attachment
from coordinator.tracked_job import TrackedJob
from muster.contracts.job.retry import RetryClass
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import RankExited, RankSaid
from muster.contracts.messages.rank import PermanentFailure, RankMessage
from muster.contracts.messages.wire import ExitRecord, encode
from muster.contracts.settings.paths import JobFiles
from muster.runtime.exit_report import write_own_record
from tests.support.stories import Story, beat, exited

REFUSED = PermanentFailure(reason=Reason.INVALID_PROGRAM, message="there is no such program")


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = JobFiles(tmp_path)
    files.exits.mkdir(parents=True)
    return files


def job() -> JobSnapshot:
    return Story.running(world_size=2).job


def unreported(
    snapshot: JobSnapshot, files: JobFiles, living: Collection[int] = ()
) -> list[RankSaid | RankExited]:
    job = TrackedJob(snapshot=snapshot, attachment=Attachment(started_at=None))
    return job.unreported_ends(files, [it for it in snapshot.ranks if it.rank not in living])


def record(said: Sequence[RankMessage], end: RankExited, pid: int) -> ExitRecord:
    words = tuple(RankSaid(rank=1, attempt=0, message=message) for message in said)
    return ExitRecord(pid=pid, at="", said=words, exited=end)


def write(files: JobFiles, said: Sequence[RankMessage], end: RankExited, pid: int) -> None:
    files.exit_record(1, 0).write_bytes(encode(record(said, end, pid)))


def write_own(files: JobFiles, said: Sequence[RankMessage], end: RankExited, pid: int) -> None:
    write_own_record(files, record(said, end, pid))


def pid_of(snapshot: JobSnapshot, rank: int) -> int:
    identity = snapshot.ranks[rank].attempt.identity
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
        ([], exited(1, 0, signal=9), RetryClass.KILLED),
        ([], exited(1, 0, signal=9, out_of_memory=True), RetryClass.OUT_OF_MEMORY),
        ([], exited(1, 0, code=1, lines=["MemoryError"]), RetryClass.OUT_OF_MEMORY),
        ([REFUSED], exited(1, 0, code=1), RetryClass.INVALID_PROGRAM),
    ],
)
def test_a_recorded_exit_is_classified_like_a_reported_one(
    files: JobFiles, said: Sequence[RankMessage], end: RankExited, kind: RetryClass
) -> None:
    story = Story(job())
    write(files, said, end, pid_of(story.job, 1))
    for message in unreported(story.job, files):
        story.observes(message)
    ending = story.rank(1).ending
    assert ending is not None
    assert ending.retry_class is kind
    assert story.rank(0).is_alive
    assert unreported(story.job, files) == [], "it was received"


def test_without_a_record_there_is_no_end(files: JobFiles) -> None:
    assert unreported(job(), files) == []


def test_without_an_agents_record_the_ranks_own_counts(files: JobFiles) -> None:
    snapshot = job()
    write_own(files, [beat(step=9)], exited(1, 0, code=0), pid_of(snapshot, 1))
    said, end = unreported(snapshot, files)
    assert isinstance(said, RankSaid)
    assert (said.message, end) == (beat(step=9), exited(1, 0, code=0))


def test_the_end_of_a_living_rank_is_left_to_its_agent(files: JobFiles) -> None:
    snapshot = job()
    write_own(files, [], exited(1, 0, code=0), pid_of(snapshot, 1))
    assert unreported(snapshot, files, living={1}) == []
