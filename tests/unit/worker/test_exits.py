"""How a rank ended, from everything that an agent can know, and what is recorded of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import RankExited, RankSaid
from muster.contracts.messages.rank import ERROR_LIMIT, Hello, PermanentFailure, RankMessage, Warned
from muster.contracts.rank import Phase
from muster.contracts.settings.paths import JobFiles
from muster.runtime.exit_report import make_exit_record, read_exit_record, write_own_record
from muster.runtime.redaction import Redaction
from tests.support.stories import beat, saved
from worker.ranks.exits import ExitLog, OomKills, read_error_file
from worker.ranks.process import UNKNOWN_EXIT, ExitStatus
from worker.ranks.rank import RankProcess

PID = 7
DONE = ExitStatus(exit_code=0, signal=None)
FAILED = ExitStatus(exit_code=1, signal=None)
KILLED = ExitStatus(exit_code=None, signal=9)
REFUSED = PermanentFailure(reason=Reason.INVALID_PROGRAM, message="no such program")
SECRET = "correct horse battery staple"  # noqa: S105  for a test


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = JobFiles(tmp_path)
    files.run.mkdir()
    return files


def exited(status: ExitStatus, *received: RankMessage) -> RankProcess:
    process = SimpleNamespace(pid=PID, identity=None, exit_status=lambda: status)
    rank = RankProcess(rank=1, attempt=2, tag="", log=None, process=process, channel=None)
    for message in received:
        rank.keep(message)
    return rank


def own_record(files: JobFiles, code: int, *messages: RankMessage, pid: int = PID) -> None:
    exited = RankExited(rank=1, attempt=2, exit_code=code, signal=None, last_lines=())
    said = (RankSaid(rank=1, attempt=2, message=message) for message in messages)
    write_own_record(files, make_exit_record(pid, said, exited))


def examine(files: JobFiles, rank: RankProcess) -> tuple[Sequence[RankMessage], ExitStatus]:
    unreported, status = ExitLog(files, Redaction([SECRET])).examine(rank)
    return [said.message for said in unreported], status


@pytest.mark.parametrize("status", [DONE, UNKNOWN_EXIT])
def test_without_an_own_record_the_seen_status_counts(files: JobFiles, status: ExitStatus) -> None:
    own_record(files, 64, Hello(), pid=PID + 1)  # of another process
    assert examine(files, exited(status)) == ([], status)


def test_a_heartbeat_of_when_the_exit_began_does_not_replace_a_later_one(files: JobFiles) -> None:
    last = beat(48, phase=Phase.FINISHED, stopping=True)
    own_record(files, 0, saved(48), beat(48, phase=Phase.FINISHED))
    assert examine(files, exited(DONE, last)) == ([saved(48)], DONE)
    own_record(files, 0, beat(48, phase=Phase.FINISHED))
    first = beat(45)
    assert examine(files, exited(DONE, first)) == ([beat(48, phase=Phase.FINISHED)], DONE)


def test_an_unseen_exit_is_taken_from_the_own_record(files: JobFiles) -> None:
    own_record(files, 64, Hello(), beat(step=9))
    rank = exited(UNKNOWN_EXIT)
    status = ExitStatus(exit_code=64, signal=None)
    assert examine(files, rank) == ([Hello(), beat(step=9)], status)
    kept = [said.message for said in rank.kept_messages()]
    assert kept == [Hello(), beat(step=9)], "for a later coordinator"


def test_lost_messages_are_reported_and_none_twice(files: JobFiles) -> None:
    warned = Warned(message="careful")
    own_record(files, 0, Hello(), warned, beat(step=9, stopping=True), REFUSED)
    rank = exited(DONE, Hello(), warned, beat(step=3))
    assert examine(files, rank) == ([beat(step=9, stopping=True), REFUSED], DONE)


def test_a_redacted_message_is_not_reported_twice(files: JobFiles) -> None:
    own_record(files, 1, Warned(message="refused: [secret]"))
    assert examine(files, exited(DONE, Warned(message=f"refused: {SECRET}"))) == ([], DONE)


def test_a_kill_after_the_own_record_is_still_a_kill(files: JobFiles) -> None:
    own_record(files, 0)
    assert examine(files, exited(KILLED)) == ([], KILLED)


def test_a_failure_is_recorded_with_the_programs_error_file(files: JobFiles) -> None:
    files.error_file(1, 2).write_text('{"message": {"message": "ValueError: no"}}')
    files.error_file(1, 1).write_text('{"message": "of the previous attempt"}')
    for status, error in ((FAILED, "ValueError: no"), (DONE, None)):
        assert ExitLog(files, Redaction()).record(exited(status), status).exited.error == error
    record = read_exit_record(files, 1, 2, None)
    assert record is not None
    assert record.exited.error == "ValueError: no"


@pytest.mark.parametrize("shown", [1, len("[secret]"), 19])
def test_an_error_is_redacted_before_it_is_cut(files: JobFiles, shown: int) -> None:
    text = "x" * (ERROR_LIMIT - shown) + SECRET
    files.error_file(1, 2).write_text(json.dumps({"message": text}))
    recorded = ExitLog(files, Redaction([SECRET])).record(exited(FAILED), FAILED)
    assert recorded.exited.error == ("x" * (ERROR_LIMIT - shown) + "[secret]")[:ERROR_LIMIT]


# torch's error file


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (
            b'{"message": {"message": "ValueError: no", "extraInfo": {"timestamp": "17"}}}',
            "ValueError: no",
        ),
        (b'{"message": " signal 11 \\n", "errorCode": 3}', "signal 11"),
        (b"", None),
        (b"{", None),
        (b'{"message": {"message": "half', None),
        (b"null", None),
        (b"[]", None),
        (b'{"message": 3}', None),
        (b'{"message": {"text": "no"}}', None),
        (b'{"message": "  "}', None),
        (b'{"message": "\xff"}', None),
        (b'{"a": ' + b"[" * 100_000, None),
        (None, None),
    ],
    ids=range(13),
)
def test_only_a_valid_error_file_gives_an_error(
    tmp_path: Path, content: bytes | None, error: str | None
) -> None:
    path = tmp_path / "error.json"
    if content is not None:
        path.write_bytes(content)
    assert read_error_file(path) == error


# Out of memory

V2 = ("0::/job/ranks\n", "job/ranks/memory.events", "low 0\nmax 9\noom 3\noom_kill {}\n")
V1 = (
    "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n",
    "memory/job/memory.oom_control",
    "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
)


@pytest.mark.parametrize(("membership", "name", "content"), [V2, V1], ids=["v2", "v1"])
def test_each_oom_kill_is_claimed_once(
    tmp_path: Path, membership: str, name: str, content: str
) -> None:
    (tmp_path / "cgroup").write_text(membership)
    counter = tmp_path / "fs" / name
    counter.parent.mkdir(parents=True)
    counter.write_text(content.format(2))
    kills = OomKills(tmp_path / "cgroup", tmp_path / "fs")
    assert not kills.claim(), "it happened before the start"
    counter.write_text(content.format(4))
    assert [kills.claim() for _ in range(3)] == [True, True, False]


def test_without_a_counter_there_is_no_oom_kill(tmp_path: Path) -> None:
    assert not OomKills(tmp_path / "absent", tmp_path).claim()
    (tmp_path / "cgroup").write_text("0::/elsewhere\n")
    assert not OomKills(tmp_path / "cgroup", tmp_path).claim()
