"""Lines of a file from its end on, and what people see of them."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.logs import lines
from api.logs.lines import LINE_LIMIT_BYTES, PIECE_BYTES, Line, backwards, complete_size, shown


@pytest.fixture(params=[4, 32 * 1024])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log, read in tiny blocks and in those of real life."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", request.param)
    return tmp_path / "log"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text("ab\n", max_size=60).map(str.encode))
def test_backwards_is_forwards_reversed(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    found = list(backwards(path, len(text)))[::-1]
    assert [line.head for line in found] == text.removesuffix(b"\n").split(b"\n")[: len(found)]
    assert [line.end for line in found][:-1] == [line.start for line in found][1:]
    assert sum(line.end - line.start for line in found) == len(text)
    assert complete_size(path) == text.rfind(b"\n") + 1


def test_a_missing_file_has_no_lines(path: Path) -> None:
    assert list(backwards(path, 0)) == []
    assert complete_size(path) == 0


def test_an_endless_line_is_cut_and_counted(path: Path) -> None:
    path.write_bytes(b"x" * (LINE_LIMIT_BYTES + 7) + b"\nnext\n")
    cut = "x" * LINE_LIMIT_BYTES + " … [7 bytes cut]"
    assert [line.text for line in backwards(path, LINE_LIMIT_BYTES + 13)] == ["next", cut]


def test_no_letter_is_torn_where_a_line_is_cut(path: Path) -> None:
    path.write_text("x" + "é" * LINE_LIMIT_BYTES + "\n")
    (line,) = backwards(path, path.stat().st_size)
    assert isinstance(line, Line)
    whole = LINE_LIMIT_BYTES // 2 - 1
    assert line.text == "x" + "é" * whole + f" … [{2 * (LINE_LIMIT_BYTES - whole)} bytes cut]"


def test_the_bytes_that_are_cut_off_an_unfinished_line_are_counted_too(path: Path) -> None:
    path.write_bytes(b"x" * (LINE_LIMIT_BYTES + 7))
    (line,) = backwards(path, LINE_LIMIT_BYTES + 7)
    assert isinstance(line, Line)
    assert line.text == "x" * LINE_LIMIT_BYTES + " … [7 bytes cut]"


def test_a_line_without_end_is_read_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", 8)
    path.write_bytes(b"first\n" + bytes(range(65, 85)) + b"\nlast")
    found = [line.text for line in backwards(path, 31) if isinstance(line, Line)]
    assert found == ["last", "NOPQRST", "FGHIJKLM", "ABCDE", "first"]
    assert complete_size(path) == 27
    path.write_bytes(b"first\n" + b"x" * 20)
    assert complete_size(path) == 26, "its pieces are lines"


def test_what_begins_before_is_shown_from_there_on(path: Path) -> None:
    path.write_bytes(b"first\nsecond\n")
    assert [line.text for line in backwards(path, 13, begin=3) if isinstance(line, Line)] == [
        "second",
        "st",
    ]


def test_of_a_log_of_two_gigabytes_without_a_line_end_little_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    taken = counted(monkeypatch)
    with path.open("wb") as log:
        log.truncate(2 << 30)
    assert complete_size(path) == 2 << 30
    last = next(backwards(path, 2 << 30))
    assert (last.start, last.end) == ((2 << 30) - PIECE_BYTES, 2 << 30)
    assert sum(taken) < 3 * PIECE_BYTES


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many bytes each read of a log takes, from now on."""
    taken: list[int] = []
    really = lines.read

    def read(path: Path, start: int, count: int) -> bytes:
        taken.append(count)
        return really(path, start, count)

    monkeypatch.setattr(lines, "read", read)
    return taken


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain\n", "plain"),
        (b"windows\r\n", "windows"),
        (b"10%\r20%\n", "10%\\r20%"),
        (b"\xff\n", "�"),
        (b"unfinished", "unfinished"),
        ("é\n".encode(), "é"),
    ],
)
def test_what_people_see(path: Path, raw: bytes, text: str) -> None:
    path.write_bytes(raw)
    assert [line.text for line in backwards(path, len(raw))] == [text]


@given(lines=st.lists(st.text("ab\r\xff", max_size=6).map(lambda line: line.encode("latin-1"))))
def test_many_lines_look_as_each_does(lines: list[bytes]) -> None:
    assert shown(b"\n".join(lines)) == "\n".join(map(shown, lines))


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    raw=st.text("ab\r\n", max_size=60).map(str.encode),
    text=st.sampled_from(["a", "bb", "ab", "\\r", "b\\", "�", "\n", ""]),
)
def test_what_is_passed_over_does_not_hold_the_text(path: Path, raw: bytes, text: str) -> None:
    path.write_bytes(raw)
    everything = [line for line in backwards(path, len(raw)) if isinstance(line, Line)]
    looked_at = list(backwards(path, len(raw), text))
    assert [one.end for one in looked_at][1:] == [one.start for one in looked_at][:-1]
    found = [line for line in looked_at if isinstance(line, Line) and text in line.text]
    assert found == [line for line in everything if text in line.text]
