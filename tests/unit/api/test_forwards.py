"""Lines of a growing file, cut anywhere, handed out as they become complete."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.logs import lines
from api.logs.forwards import Follower, Stretch
from api.logs.lines import LINE_LIMIT_BYTES

CHUNKS = st.lists(st.text("ab\n", max_size=12).map(str.encode), max_size=12)


@pytest.fixture(params=[4, 32 * 1024])
def path(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log, read in tiny blocks and in those of real life."""
    monkeypatch.setattr(lines, "BLOCK_BYTES", request.param)
    return tmp_path / "log"


def everything(follower: Follower) -> list[Stretch]:
    found = []
    while got := follower.read():
        found += got
    return found


def text(found: list[Stretch]) -> str:
    return "\n".join(stretch.text for stretch in found)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(chunks=CHUNKS)
def test_a_follower_hands_out_each_complete_line_once(path: Path, chunks: list[bytes]) -> None:
    path.unlink(missing_ok=True)
    follower = Follower(path, 0)
    found: list[Stretch] = []
    written = b""
    for chunk in chunks:
        written += chunk
        path.write_bytes(written)
        found += everything(follower)
        assert follower.offset == written.rfind(b"\n") + 1
    found += follower.rest()
    assert text(found) == written.decode().removesuffix("\n")
    assert follower.offset == len(written)
    assert [one.start for one in found] == [0, *[one.end for one in found]][: len(found)]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(written=st.text("ab\n", max_size=40).map(str.encode), limit=st.integers(0, 45))
def test_nothing_beyond_the_limit_is_handed_out(path: Path, written: bytes, limit: int) -> None:
    path.write_bytes(written)
    follower = Follower(path, 0, limit)
    found = everything(follower) + follower.rest()
    assert text(found) == written[:limit].decode().removesuffix("\n")
    assert follower.offset == min(limit, len(written))


@given(written=st.text("ab\n", min_size=1, max_size=20).map(str.encode), place=st.integers(0, 25))
def test_a_stretch_is_parted_between_lines(written: bytes, place: int) -> None:
    whole = Stretch(start=5, end=6 + len(written), raw=written)
    place = max(place, whole.first_end)
    first, rest = whole.parted(place)
    assert first.end <= place or rest is None
    assert first.first_end == whole.first_end
    assert (first.raw + b"\n" + rest.raw if rest else first.raw) == written
    if rest is not None:
        assert (first.start, first.end, rest.end) == (5, rest.start, whole.end)
        assert rest.first_end > place


def test_a_missing_file_has_no_lines(path: Path) -> None:
    assert Follower(path, 0).read() == []
    assert Follower(path, 0).rest() == []


def test_a_file_that_shrank_begins_anew(path: Path) -> None:
    path.write_bytes(b"long line\n")
    follower = Follower(path, 10)
    path.write_bytes(b"new\n")
    assert text(follower.read()) == "new"


def test_a_link_is_not_followed(path: Path) -> None:
    secret = path.with_name("secret")
    secret.write_bytes(b"secret\n")
    path.symlink_to(secret)
    assert Follower(path, 0).read() == []


def test_an_endless_line_is_cut_and_counted(path: Path) -> None:
    path.write_bytes(b"first\n" + b"x" * (LINE_LIMIT_BYTES + 7) + b"\nnext\n")
    cut = "x" * LINE_LIMIT_BYTES + " … [7 bytes cut]"
    found = everything(Follower(path, 0))
    assert text(found) == f"first\n{cut}\nnext"
    assert found[-1].end == path.stat().st_size


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(written=st.text("ab\n", max_size=60).map(str.encode), again=st.integers(0, 6))
def test_a_long_line_comes_in_pieces_without_a_byte_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch, written: bytes, again: int
) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", 5)
    path.write_bytes(written)
    found = everything(Follower(path, 0))
    # Another goes on behind any of them, as after an id.
    place = found[min(again, len(found)) - 1].end if found and again else 0
    later = Follower(path, place)
    found = [one for one in found if one.end <= place] + everything(later) + later.rest()
    assert [one.start for one in found] == [0, *[one.end for one in found]][: len(found)]
    assert b"".join(written[one.start : one.end] for one in found) == written
    assert all(len(line) <= 5 for one in found for line in one.raw.split(b"\n"))
    assert sum(len(one.raw.replace(b"\n", b"")) for one in found) == len(written) - written.count(
        b"\n"
    )


def test_a_line_that_fills_a_piece_is_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", 8)
    path.write_bytes(b"exactly8\nlonger than 8\n")
    assert text(everything(Follower(path, 0))) == "exactly8\nlonger t\nhan 8"


def test_one_look_reads_no_more_than_a_piece_of_a_line_without_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log:
        log.truncate(2 << 30)
    follower = Follower(path, 0)
    (piece,) = follower.read()
    assert (piece.start, piece.end) == (0, lines.PIECE_BYTES)
    cut = lines.PIECE_BYTES - LINE_LIMIT_BYTES
    assert piece.text == "\0" * LINE_LIMIT_BYTES + f" … [{cut} bytes cut]"
    assert follower.offset == lines.PIECE_BYTES
