"""To go on until nothing is left, and not for ever."""

from muster.patience import Patience


def test_one_goes_on_until_a_look_finds_nobody() -> None:
    found = iter([3, 1, 0, 7])
    assert Patience(seconds=600.0, pause_seconds=0.0).outlast(lambda: next(found)) == 0
    assert next(found) == 7, "and looks no more"


def test_patience_that_is_over_says_how_many_are_left() -> None:
    assert Patience(seconds=-1.0, pause_seconds=600.0).outlast(lambda: 2) == 2
    assert Patience(seconds=-1.0, pause_seconds=600.0).outlast(lambda: 0) == 0
