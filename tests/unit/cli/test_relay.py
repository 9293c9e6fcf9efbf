"""What ranks write into their logs is said once, in whole lines, with the rank before it."""

from pathlib import Path

import pytest
from scarcity import no_descriptors

from cli.relay import CHUNK_BYTES, ROUNDS, Relay
from muster.contracts.layout import JobFiles


class Stage:
    def __init__(self, root: Path) -> None:
        self.files = JobFiles(root)
        self.files.logs.mkdir()
        self.said: list[str] = []

    def relay(self) -> Relay:
        return Relay(self.files.logs, self.said.append)

    def write(self, rank: int, text: str, incarnation: int = 0) -> None:
        with self.files.log(rank, incarnation).open("a") as log:
            log.write(text)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_each_line_is_said_once_with_its_rank(stage: Stage) -> None:
    relay = stage.relay()
    stage.write(0, "one\ntwo\n")
    stage.write(11, "ü\n\n")
    relay.pass_on()
    relay.pass_on()
    assert stage.said == ["[0] one\n[0] two", "[11] ü\n[11] "]
    stage.write(0, "three\n")
    stage.write(0, "of the next process\n", incarnation=1)
    relay.pass_on()
    assert stage.said[2:] == ["[0] three", "[0] of the next process"]


def test_a_line_is_not_said_before_it_has_ended_but_in_the_end_all_is(stage: Stage) -> None:
    relay = stage.relay()
    stage.write(0, "one\ntw")
    relay.pass_on()
    assert stage.said == ["[0] one"]
    stage.write(0, "o\nthree")
    relay.finish()
    relay.finish()
    assert stage.said == ["[0] one", "[0] two", "[0] three"]


def test_what_an_earlier_call_has_shown_is_not_said_again(stage: Stage) -> None:
    stage.write(0, "before\n")
    relay = stage.relay()
    stage.write(0, "after\n")
    relay.finish()
    assert stage.said == ["[0] after"]


def test_a_line_that_never_ends_is_said_in_pieces(stage: Stage) -> None:
    relay = stage.relay()
    stage.write(0, "x" * (2 * CHUNK_BYTES + 1))
    relay.pass_on()
    assert [len(piece) for piece in stage.said] == [CHUNK_BYTES + len("[0] ")] * 2
    relay.finish()
    assert stage.said[2:] == ["[0] x"]


def test_no_letter_of_a_long_line_is_torn(stage: Stage) -> None:
    relay = stage.relay()
    line = "a" + "é" * CHUNK_BYTES
    stage.write(0, line)
    relay.pass_on()
    relay.finish()
    assert "".join(piece.removeprefix("[0] ") for piece in stage.said) == line


def test_bytes_that_are_no_text_keep_nothing_waiting(stage: Stage) -> None:
    relay = stage.relay()
    with stage.files.log(0, 0).open("wb") as log:
        log.write(b"\xff" * CHUNK_BYTES + b"\xc3")
    relay.finish()
    assert [len(piece) for piece in stage.said] == [CHUNK_BYTES + len("[0] "), len("[0] x")]


def test_a_flood_is_passed_on_bit_by_bit_and_in_the_end_as_a_whole(stage: Stage) -> None:
    relay = stage.relay()
    line = "x" * (CHUNK_BYTES - 1) + "\n"
    stage.write(0, (ROUNDS + 1) * line)
    stage.write(1, "me too\n")
    relay.pass_on()
    assert len(stage.said) == ROUNDS + 1
    assert stage.said[1] == "[1] me too"
    relay.finish()
    assert len(stage.said) == ROUNDS + 2


def test_what_is_no_log_or_is_gone_is_not_said(stage: Stage) -> None:
    stage.write(0, "here\n")
    relay = stage.relay()
    (stage.files.logs / "mine.log").write_text("not a rank's\n")
    stage.files.log(0, 0).unlink()
    relay.finish()
    assert stage.said == []


def test_logs_may_not_be_there_yet(tmp_path: Path) -> None:
    Relay(tmp_path / "none", pytest.fail).finish()


def test_while_no_file_can_be_opened_nothing_is_said_and_later_all_is(stage: Stage) -> None:
    relay = stage.relay()
    stage.write(0, "one\n")
    for spare in (0, 1):  # the second is for a look at what logs there are
        with no_descriptors(but=spare):
            relay.pass_on()
    relay.pass_on()
    assert "".join(stage.said) == "[0] one"
