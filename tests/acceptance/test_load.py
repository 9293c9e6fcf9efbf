"""Short runs of the loads: what they find of time is the machine's, the rest has to hold."""

from collections.abc import Iterable
from pathlib import Path

from stress.load.answers import cost_figure
from stress.load.figures import Figure
from stress.load.lists import list_figures
from stress.load.submissions import sqlite_figures
from stress.security.siege import siege_figures


def misses(figures: Iterable[Figure]) -> list[Figure]:
    """Return what has been missed and is no matter of time."""
    return [figure for figure in figures if not figure.is_met and not is_of_time(figure)]


def is_of_time(figure: Figure) -> bool:
    return figure.goal.endswith((" ms", " s")) or "submissions/s" in figure.what


def test_pages_are_whole_among_many_jobs(tmp_path: Path) -> None:
    assert not misses(list_figures(tmp_path / "lists", jobs=630, requests=3))


def test_the_cost_of_a_status_is_found(tmp_path: Path) -> None:
    assert float(cost_figure(tmp_path / "cost", rounds=3).found) > 1  # it does more than nothing


def test_no_submission_of_a_flood_is_lost_or_there_twice(tmp_path: Path) -> None:
    assert not misses(sqlite_figures(tmp_path / "flood", seconds=1))


def test_a_besieged_service_refuses_what_it_should_and_nothing_else(tmp_path: Path) -> None:
    # A flood of a second would not use up what it may ask for at other times.
    narrow = {"MUSTER_REQUESTS_PER_SECOND": "1", "MUSTER_REQUESTS_AT_ONCE": "6"}
    assert not misses(siege_figures(tmp_path, seconds=1, lorises=12, **narrow))
