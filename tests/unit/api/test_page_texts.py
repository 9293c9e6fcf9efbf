"""Which rank differs from the others."""

from typing import Any

import pytest

from api.page.texts import differing

Ranks = list[dict[str, Any]]


def rank(number: int, step: int = 100, rate: float = 10.0, process: str = "live") -> dict[str, Any]:
    return {"rank": number, "step": step, "throughput_steps_per_sec": rate, "process": process}


TABLES: list[tuple[Ranks, dict[int, str]]] = [
    ([], {}),
    ([rank(0)], {}),
    ([rank(0), rank(1, 60), rank(2, 70)], {}),  # within the time between two heartbeats
    ([rank(0), rank(1, 49), rank(2)], {1: "behind"}),
    ([rank(0, rate=0), rank(1, 97, rate=0), rank(2, rate=0)], {1: "behind"}),
    ([rank(0), rank(1, rate=4.9), rank(2), rank(3, rate=20.1)], {1: "slow", 3: "fast"}),
    ([rank(0), rank(1, rate=0), rank(2)], {}),  # not known yet
    ([rank(0), rank(1, 0, 0, "suspect"), rank(2, 0, 0, "exited")], {1: "suspect"}),
    ([rank(0, 500, process="finished"), rank(1), rank(2, 40, 8)], {}),
]


@pytest.mark.parametrize(("ranks", "expected"), TABLES)
def test_the_rank_that_differs_has_a_word(ranks: Ranks, expected: dict[int, str]) -> None:
    assert differing(ranks) == expected
