import os
from pathlib import Path

import pytest

from muster.log_end import LAST_BYTES, LAST_LINES, TOO_LONG, last_lines


def end_of(path: Path, written: bytes) -> tuple[str, ...]:
    path.write_bytes(written)
    log = os.open(path, os.O_RDONLY)
    try:
        return last_lines(log)
    finally:
        os.close(log)


@pytest.mark.parametrize(
    ("written", "quoted"),
    [
        (b"", ()),
        (b"one", ("one",)),
        (b"one\n\ntwo\n", ("one", "", "two")),
        (b"\xff\xfe\n", ("\ufffd\ufffd",)),
        (b"\n".join(b"%d" % n for n in range(50)), tuple(str(n) for n in range(40, 50))),
    ],
)
def test_the_last_lines_are_quoted(tmp_path: Path, written: bytes, quoted: tuple[str, ...]) -> None:
    assert end_of(tmp_path / "log", written) == quoted


def test_of_a_line_without_end_nothing_is_quoted_but_that_it_is_there(tmp_path: Path) -> None:
    assert end_of(tmp_path / "log", b"x" * 100_000 + b"end") == (TOO_LONG,)


def test_half_a_line_is_not_quoted_as_it_may_be_half_a_secret(tmp_path: Path) -> None:
    written = b"correct horse battery staple\n" + b"x" * (LAST_BYTES - 10) + b"\nend\n"
    assert end_of(tmp_path / "log", written) == ("x" * (LAST_BYTES - 10), "end")


def test_no_more_than_ten_lines_are_quoted(tmp_path: Path) -> None:
    assert LAST_LINES == 10
    assert len(end_of(tmp_path / "log", b"a line\n" * 11)) == LAST_LINES
