"""An environment that is too large is told in figures, and not in values."""

import errno

from worker.oversize import oversize


def test_all_that_is_handed_over_counts_and_the_ranks_own_part_is_told() -> None:
    given = {"SMALL": "s", "LARGE": "x" * 200_000}
    error = oversize({"INHERITED": "y" * 100_000, **given}, given)
    assert error.errno == errno.E2BIG
    assert "the environment is 300050 bytes, of which env, secrets" in str(error)
    assert "what Muster adds are 200031, and" in str(error)
    assert "the longest is LARGE with 200015. " in str(error)


def test_no_value_is_told() -> None:
    given = {"KEY": "k3y" * 50_000}
    assert "k3y" not in str(oversize({**given, "OTHER": "0th3r"}, given))
    assert "0th3r" not in str(oversize({**given, "OTHER": "0th3r"}, given))
