import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from scarcity import no_descriptors

from muster.contracts.layout import TIME_MARK
from muster.sight import FOR_A_LOOK
from worker.logbook import FOR_NOTES, LateLogbook, Logbook


@pytest.fixture
def logbook(tmp_path: Path) -> Iterator[Logbook]:
    book = Logbook(tmp_path / "logs" / "a.log", tmp_path / "logs" / "a.times")
    yield book
    book.close()


def marks(tmp_path: Path) -> list[tuple[int, int]]:
    return list(TIME_MARK.iter_unpack((tmp_path / "logs" / "a.times").read_bytes()))


def test_a_note_says_how_much_was_written_by_when(logbook: Logbook, tmp_path: Path) -> None:
    os.write(logbook.descriptor, b"abc\n")
    logbook.note(1.5)
    os.write(logbook.descriptor, b"de")
    logbook.note(2.25)
    assert marks(tmp_path) == [(4, 1_500_000), (6, 2_250_000)]


def test_a_logbook_that_cannot_be_opened_keeps_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "times").mkdir()
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
    with pytest.raises(IsADirectoryError):
        Logbook(tmp_path / "log", tmp_path / "times")
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_nothing_new_is_nothing_to_note(logbook: Logbook, tmp_path: Path) -> None:
    logbook.note(1.0)
    os.write(logbook.descriptor, b"a")
    logbook.note(2.0)
    logbook.note(3.0)
    assert marks(tmp_path) == [(1, 2_000_000)]


def test_a_log_that_was_there_is_written_on(logbook: Logbook, tmp_path: Path) -> None:
    os.write(logbook.descriptor, b"a\n")
    again = Logbook(tmp_path / "logs" / "a.log", tmp_path / "logs" / "a.times")
    os.write(again.descriptor, b"b\n")
    again.close()
    assert logbook.last_lines() == ("a", "b")


def test_times_go_on_where_an_agent_that_died_has_left_them(
    logbook: Logbook, tmp_path: Path
) -> None:
    os.write(logbook.descriptor, b"abc\n")
    logbook.note(1.0)
    with (tmp_path / "logs" / "a.times").open("ab") as times:
        times.write(b"half a note")
    successor = Logbook(tmp_path / "logs" / "a.log", tmp_path / "logs" / "a.times")
    successor.note(2.0)
    os.write(successor.descriptor, b"d")
    successor.note(3.0)
    successor.close()
    assert marks(tmp_path) == [(4, 1_000_000), (5, 3_000_000)]


def test_logs_are_for_their_owner_alone(logbook: Logbook, tmp_path: Path) -> None:
    assert os.fstat(logbook.descriptor).st_mode & 0o077 == 0
    assert (tmp_path / "logs" / "a.times").stat().st_mode & 0o077 == 0


def test_a_log_that_cannot_be_opened_yet_is_noted_as_soon_as_it_can(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log, times = tmp_path / "logs" / "a.log", tmp_path / "logs" / "a.times"
    log.parent.mkdir()
    log.write_text("written meanwhile\n")
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
    book = LateLogbook(log, times)
    assert not times.exists(), "the rank is not held yet"
    with no_descriptors(but=FOR_A_LOOK + FOR_NOTES - 1):
        book.note(1.0)
        book.note(1.5)
        assert book.last_lines() == ()
    (line,) = capfd.readouterr().err.splitlines()
    assert "a.log" in line
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    book.note(2.0)
    assert marks(tmp_path) == [(18, 2_000_000)]
    assert book.last_lines() == ("written meanwhile",)
    book.close()
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
