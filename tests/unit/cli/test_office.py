"""Who keeps the services of a data directory, who only looks, and who has lost it."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from cli import office
from cli.office import AlreadyUp, NoDataDirectory, holder_of, is_held, sole_office
from muster.contracts.layout import DataDirectory
from muster.patience import Patience
from muster.processes import myself

URL = "http://127.0.0.1:8000"
THERE = "http://127.0.0.1:8001"


@pytest.fixture
def files(tmp_path: Path) -> DataDirectory:
    return DataDirectory(tmp_path / "data")


def test_the_record_says_who_and_where_as_long_as_the_office_is_held(files: DataDirectory) -> None:
    assert (is_held(files), holder_of(files)) == (False, None)
    with sole_office(files) as held:
        assert (is_held(files), holder_of(files)) == (True, None), "it has yet to find a place"
        held.publish_end()
        assert holder_of(files) is None, "it was nowhere"
        held.publish(URL, ["localhost"], None)
        holder = holder_of(files)
        assert holder is not None
        assert (holder.url, holder.process, holder.is_ending) == (URL, myself(), False)
        held.publish_end()
        ending = holder_of(files)
        assert ending is not None
        assert (ending.url, ending.is_ending) == (URL, True)
    assert (is_held(files), holder_of(files)) == (False, None)


def test_what_is_no_record_names_nobody(files: DataDirectory) -> None:
    files.root.mkdir()
    files.keeper.write_text('{"url": 7')
    assert holder_of(files) is None


def test_who_only_looks_does_not_keep_the_office_from_anybody(
    files: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.root.mkdir()
    with files.keeper_lock.open("ab") as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        assert not is_held(files), "two who look do not see each other"
        lock = fcntl.flock

        def is_looked_away(file: BinaryIO, how: int) -> None:
            """Let the look end as soon as it has been in somebody's way."""
            try:
                lock(file, how)
            except BlockingIOError:
                lock(looker, fcntl.LOCK_UN)
                raise

        monkeypatch.setattr(fcntl, "flock", is_looked_away)
        with sole_office(files):
            assert is_held(files)


def test_of_two_the_second_hears_at_once_where_the_first_is(
    files: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(office, "LOOKERS", Patience(seconds=0.0, pause_seconds=0.0))
    with sole_office(files) as first:
        with pytest.raises(AlreadyUp, match="at a place it has yet to find"), sole_office(files):
            pass
        first.publish(URL, [], None)
        # There is no pause of less than nothing: whoever makes one is told so.
        monkeypatch.setattr(office, "LOOKERS", Patience(seconds=60.0, pause_seconds=-1.0))
        with pytest.raises(AlreadyUp, match=f"at {URL}: use that one"), sole_office(files):
            pass
        assert (is_held(files), holder_of(files) is not None) == (True, True)


def test_where_there_can_be_no_directory_there_is_no_office(files: DataDirectory) -> None:
    files.root.write_text("a file is in its place")
    with pytest.raises(NoDataDirectory, match="cannot hold the data"), sole_office(files):
        pass
    assert not is_held(files)


@pytest.mark.parametrize(
    "lose",
    [shutil.rmtree, lambda root: root.rename(root.with_name("moved"))],
    ids=["removed", "moved"],
)
def test_who_has_lost_an_office_does_nothing_in_its_place(
    lose: Callable[[Path], object], files: DataDirectory
) -> None:
    with sole_office(files) as lost:
        lost.publish(URL, (), None)
        lose(files.root)
        assert lost.is_lost()
        lost.publish_end()
        assert not files.root.exists()
        with sole_office(files) as other:
            assert lost.is_lost()
            other.publish(THERE, (), None)
            lost.publish_end()
            holder = holder_of(files)
            assert holder is not None
            assert (holder.url, holder.is_ending) == (THERE, False)
            assert not other.is_lost()


def test_a_file_system_that_does_not_answer_is_no_loss(
    files: DataDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with sole_office(files) as held:
        with monkeypatch.context() as away:
            away.setattr(os, "fstat", fails)
            away.setattr(Path, "stat", fails)
            assert not held.is_lost()
        assert not held.is_lost()


def test_the_record_of_who_came_later_stays(files: DataDirectory) -> None:
    with sole_office(files) as lost:
        lost.publish(URL, (), None)
        shutil.rmtree(files.root)
        files.root.mkdir()
        files.keeper_lock.touch()
        files.keeper.write_text("another's")
    assert files.keeper.read_text() == "another's"
