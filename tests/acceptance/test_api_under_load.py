"""Short runs of the load tests; timing goals are ignored, all others must hold."""

from collections.abc import Iterable
from pathlib import Path

from stress.load.answers import cost_figure
from stress.load.figures import Figure
from stress.load.lists import list_figures
from stress.load.submissions import sqlite_figures
from stress.security.siege import siege_figures


def misses(figures: Iterable[Figure]) -> list[Figure]:
    """Return the missed goals that do not depend on timing."""
    return [figure for figure in figures if not figure.is_met and not is_of_time(figure)]


def is_of_time(figure: Figure) -> bool:
    return figure.goal.endswith((" ms", " s")) or "submissions/s" in figure.what


def test_pages_are_whole_among_many_jobs(tmp_path: Path) -> None:
    assert not misses(list_figures(tmp_path / "lists", jobs=630, requests=3))


def test_the_cost_of_a_status_is_found(tmp_path: Path) -> None:
    assert (
        float(cost_figure(tmp_path / "cost", rounds=3).found) > 1
    )  # it does more than an empty route


def test_no_submission_of_a_flood_is_lost_or_duplicated(tmp_path: Path) -> None:
    assert not misses(sqlite_figures(tmp_path / "flood", seconds=1))


def test_an_attacked_service_refuses_only_the_attackers(tmp_path: Path) -> None:
    # Low limits: a flood of one second would not reach the defaults.
    narrow = {"MUSTER_REQUESTS_PER_SECOND": "1", "MUSTER_REQUESTS_AT_ONCE": "6"}
    assert not misses(siege_figures(tmp_path, seconds=1, lorises=12, **narrow))
