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
