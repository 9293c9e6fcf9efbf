"""How a child ended, as far as anybody of ours can know."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from stories import beat

from muster.contracts.job import Reason
from muster.contracts.layout import JobFiles
from muster.contracts.messages import (
    ERROR_LIMIT,
    Hello,
    RankExited,
    RankMessage,
    RankSaid,
    Refused,
    Warned,
)
from muster.exit_records import read_exit_record, record_of, write_own_account
from muster.redaction import Redaction
from worker.child import Child
from worker.ends import Ends
from worker.lives import UNSEEN, ExitStatus
from worker.logbook import Logbook

PID = 7
DONE = ExitStatus(exit_code=0, signal=None)
REFUSED = Refused(reason=Reason.INVALID_PROGRAM, message="no such program")


class Over:
    """The life of a process that is over."""

    pid = PID
    identity = None

    def __init__(self, ending: ExitStatus) -> None:
        self._ending = ending

    def signal_group(self, number: int) -> None:
        """Nobody is there."""

    def has_exited(self) -> bool:
        return True

    def ending(self) -> ExitStatus:
        return self._ending

    def let_go(self) -> None:
        """Nothing is held."""


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = JobFiles(tmp_path)
    files.run.mkdir()
    return files


def child(files: JobFiles, ending: ExitStatus, *heard: RankMessage) -> Child:
    over = Child(
        rank=1,
        incarnation=2,
        mark="uid/1/2",
        logbook=Logbook(files.log(1, 2), files.times(1, 2)),
        life=Over(ending),
        channel=None,
    )
    for message in heard:
        over.take(message)
    return over


def account(files: JobFiles, code: int, *said: RankMessage, pid: int = PID) -> None:
    exited = RankExited(rank=1, incarnation=2, exit_code=code, signal=None, last_lines=())
    words = (RankSaid(rank=1, incarnation=2, message=message) for message in said)
    write_own_account(files, record_of(pid, words, exited))


def learnt(files: JobFiles, over: Child) -> tuple[Sequence[RankMessage], ExitStatus]:
    unheard, ending = Ends(files).learn(over)
    over.logbook.close()
    return [said.message for said in unheard], ending


def test_without_an_account_an_end_is_what_was_seen_of_it(files: JobFiles) -> None:
    assert learnt(files, child(files, DONE)) == ([], DONE)
    assert learnt(files, child(files, UNSEEN)) == ([], UNSEEN)


def test_an_end_that_nobody_saw_is_what_the_process_says_itself(files: JobFiles) -> None:
    account(files, 64, Hello(), beat(step=9))
    gone = child(files, UNSEEN)
    assert learnt(files, gone) == ([Hello(), beat(step=9)], ExitStatus(exit_code=64, signal=None))
    assert list(gone.standing.values()) == [Hello(), beat(step=9)], "a later coordinator is told"


def test_what_found_a_full_channel_is_told_after_all_and_nothing_twice(files: JobFiles) -> None:
    """It was asked to go when its agent stood still: its code 0 does not mean done."""
    warned = Warned(message="careful")
    account(files, 0, Hello(), warned, beat(step=9, stopping=True), REFUSED)
    over = child(files, DONE, Hello(), warned, beat(step=3))
    assert learnt(files, over) == ([beat(step=9, stopping=True), REFUSED], DONE)


def test_what_was_heard_with_a_secret_and_written_down_without_is_not_told_twice(
    files: JobFiles,
) -> None:
    account(files, 1, Warned(message="refused: [secret]"))
    over = child(files, DONE, Warned(message="refused: correct horse"))
    unheard, _ = Ends(files, Redaction(["correct horse"])).learn(over)
    over.logbook.close()
    assert unheard == []


def test_who_was_killed_after_it_had_said_how_it_would_end_was_killed(files: JobFiles) -> None:
    account(files, 0)
    killed = ExitStatus(exit_code=None, signal=9)
    assert learnt(files, child(files, killed)) == ([], killed)


def test_another_process_says_nothing_of_this_one(files: JobFiles) -> None:
    account(files, 0, Hello(), pid=PID + 1)
    assert learnt(files, child(files, UNSEEN)) == ([], UNSEEN)


def test_an_end_goes_with_the_error_that_the_program_has_written_down(files: JobFiles) -> None:
    files.error_file(1, 2).write_text('{"message": {"message": "ValueError: no"}}')
    files.error_file(1, 1).write_text('{"message": "of the process before"}')
    failed = ExitStatus(exit_code=1, signal=None)
    for ending, error in ((failed, "ValueError: no"), (DONE, None)):
        over = child(files, ending)
        end = Ends(files).record(over, ending)
        over.logbook.close()
        assert end.exited.error == error
    recorded = read_exit_record(files, 1, 2, None)
    assert recorded is not None
    assert recorded.exited.error == "ValueError: no", "for whoever was away"


@pytest.mark.parametrize("shown", range(1, 20))
def test_a_long_error_is_cut_when_the_secrets_are_out_of_it(files: JobFiles, shown: int) -> None:
    words = "x" * (ERROR_LIMIT - shown) + "correct horse battery staple"
    files.error_file(1, 2).write_text(json.dumps({"message": words}))
    failed = ExitStatus(exit_code=1, signal=None)
    over = child(files, failed)
    end = Ends(files, Redaction(["correct horse battery staple"])).record(over, failed)
    over.logbook.close()
    assert end.exited.error == ("x" * (ERROR_LIMIT - shown) + "[secret]")[:ERROR_LIMIT]
