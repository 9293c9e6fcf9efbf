"""Who holds the office of a data directory, and that nobody acts in one that is lost."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.office import holder_of, is_held, sole_office
from muster.contracts.layout import DataDirectory

HERE, THERE = "http://127.0.0.1:1", "http://127.0.0.1:2"


def test_who_leaves_an_office_leaves_no_record(tmp_path: Path) -> None:
    files = DataDirectory(tmp_path / "data")
    with sole_office(files) as office:
        office.publish(HERE, (), None)
        assert not office.is_lost()
        assert is_held(files)
        assert holder_of(files)
    assert not is_held(files)
    assert not files.keeper.exists()


@pytest.mark.parametrize(
    "lose",
    [shutil.rmtree, lambda root: root.rename(root.with_name("moved"))],
    ids=["removed", "moved"],
)
def test_who_has_lost_an_office_does_nothing_in_its_place(
    lose: Callable[[Path], object], tmp_path: Path
) -> None:
    files = DataDirectory(tmp_path / "data")
    with sole_office(files) as lost:
        lost.publish(HERE, (), None)
        lose(files.root)
        assert lost.is_lost()
        lost.publish_end()
        assert not files.root.exists()
        with sole_office(files) as office:
            assert lost.is_lost()
            office.publish(THERE, (), None)
            lost.publish_end()
            holder = holder_of(files)
            assert holder is not None
            assert (holder.url, holder.is_ending) == (THERE, False)
            assert not office.is_lost()


def test_the_record_of_who_came_later_stays(tmp_path: Path) -> None:
    files = DataDirectory(tmp_path / "data")
    with sole_office(files) as lost:
        lost.publish(HERE, (), None)
        shutil.rmtree(files.root)
        files.root.mkdir()
        files.keeper_lock.touch()
        files.keeper.write_text("another's")
    assert files.keeper.read_text() == "another's"
