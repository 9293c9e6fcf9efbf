"""Lines of a growing file, cut anywhere, read in any order."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.logs import lines
from api.logs.lines import LINE_LIMIT_BYTES, Follower, backwards, complete_size

CHUNKS = st.lists(st.text("ab\n", max_size=12).map(str.encode), max_size=12)


@pytest.fixture(params=[4, 32 * 1024])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log, read in tiny blocks and in those of real life."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", request.param)
    return tmp_path / "log"


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(chunks=CHUNKS)
def test_a_follower_hands_out_each_complete_line_once(path: Path, chunks: list[bytes]) -> None:
    path.unlink(missing_ok=True)
    follower = Follower(path, 0)
    found = []
    written = b""
    for chunk in chunks:
        written += chunk
        path.write_bytes(written)
        while got := follower.read(8):
            found += got
        assert follower.offset == written.rfind(b"\n") + 1
    found += follower.rest()
    assert [line.head for line in found] == written.split(b"\n")[: len(found)]
    assert follower.offset == len(written)
    assert [line.start for line in found] == [0, *[line.end for line in found]][: len(found)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text("ab\n", max_size=60).map(str.encode))
def test_backwards_is_forwards_reversed(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    follower = Follower(path, 0)
    forwards = []
    while got := follower.read(8):
        forwards += got
    forwards += follower.rest()
    assert list(backwards(path, len(text))) == forwards[::-1]
    assert complete_size(path) == text.rfind(b"\n") + 1


def test_a_missing_file_has_no_lines(path: Path) -> None:
    assert Follower(path, 0).read(100) == []
    assert Follower(path, 0).rest() == []
    assert list(backwards(path, 0)) == []
    assert complete_size(path) == 0


def test_a_file_that_shrank_begins_anew(path: Path) -> None:
    path.write_bytes(b"long line\n")
    follower = Follower(path, 10)
    path.write_bytes(b"new\n")
    assert [line.head for line in follower.read(100)] == [b"new"]


def test_a_link_is_not_followed(path: Path) -> None:
    secret = path.with_name("secret")
    secret.write_bytes(b"secret\n")
    path.symlink_to(secret)
    assert Follower(path, 0).read(100) == []


def test_an_endless_line_is_cut_and_counted(path: Path) -> None:
    path.write_bytes(b"x" * (LINE_LIMIT_BYTES + 7) + b"\nnext\n")
    (cut, *_) = Follower(path, 0).read(1)
    assert cut.text == "x" * LINE_LIMIT_BYTES + " … [7 bytes cut]"
    assert [line.text for line in backwards(path, LINE_LIMIT_BYTES + 13)] == ["next", cut.text]


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
