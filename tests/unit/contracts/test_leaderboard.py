"""Which loss decides between jobs, in which order they come, and in what they differ."""

import math
from typing import Any

import pytest

from muster.contracts.leaderboard import compare, differences
from muster.contracts.views.job import SummaryView
from tests.support.summaries import rank, summary

NAN, INF = math.nan, math.inf


def job(name: str, loss: float | None, *validation: float, **more: object) -> SummaryView:
    """Return a job with a training loss, and a validation loss of each of its first ranks."""
    ranks = [rank(metrics={"val_loss": it}) for it in validation]
    silent = rank(metrics={"accuracy": 0.5})
    return summary(job_id=name, loss=loss, workers=[*ranks, silent], **more)


def test_a_metric_is_the_mean_of_the_ranks_that_reported_it_last() -> None:
    """Another rank becomes the main one when it joins: what it was before reports no more."""
    ranks = [
        rank(metrics={"val_loss": 0.125, "accuracy": 0.5}, metric_steps={"val_loss": 8}),
        rank(metrics={"val_loss": 1.0, "accuracy": 1.0}, metric_steps={"val_loss": 1}),
        rank(metrics={"val_loss": 0.375}, metric_steps={"val_loss": 8}),
    ]
    for order in (ranks, ranks[::-1]):
        assert summary(workers=order).metrics == {"val_loss": 0.25, "accuracy": 0.75}


def test_the_metric_of_keep_best_decides_if_the_jobs_agree() -> None:
    best, least = {"metric": "hits", "mode": "max"}, {"metric": "val_loss", "mode": "min"}
    jobs = [
        summary(job_id=name, loss=0.5, workers=[rank(metrics={"val_loss": loss, "hits": hits})])
        for name, loss, hits in (("a", 0.1, 3.0), ("b", 0.2, 9.0), ("c", 0.3, 6.0))
    ]
    silent = job("s", 0.4)
    for kept, more, metric, order in (
        ([best, best, None], [], "hits", "bca"),
        ([best, least, None], [], None, "abc"),  # by validation loss, as without
        ([None, None, None], [], None, "abc"),
        ([best, best, best, None], [silent], None, "sabc"),  # it has reported none
    ):
        found = compare("lr", [*jobs, *more], [{"keep_best": it} for it in kept])
        assert (found.metric, "".join(it.job_id for it in found.jobs)) == (metric, order)
        assert found.best == order[0]


FAILED = {"status": "FAILED"}


@pytest.mark.parametrize(
    ("jobs", "kind", "order", "best"),
    [
        ([job("a", 0.3), job("b", 0.1), job("c", 0.2)], "training", "bca", "b"),
        ([job("a", 0.1, 0.9), job("b", 0.2, 0.8)], "validation", "ba", "b"),
        # The mean of the ranks that report one.
        ([job("a", 0.1, 0.5, 0.7), job("b", 0.1, 0.59)], "validation", "ba", "b"),
        # Like with like: one of them has not validated yet.
        ([job("a", 0.1, 0.9), job("b", 0.2, 0.8), job("c", 0.3)], "training", "abc", "a"),
        # One without any loss, such as a queued one, decides nothing.
        ([job("q", None), job("a", 0.1, 0.9), job("b", 0.2, 0.8)], "validation", "baq", "b"),
        # Nor does one that failed before its first validation.
        ([job("f", 0.1, **FAILED), job("a", 0.1, 0.9)], "validation", "af", "a"),
        ([job("f", 0.1, 0.1, **FAILED), job("a", 0.2, 0.9)], "validation", "fa", "a"),
        ([job("f", 0.1, **FAILED)], "training", "f", None),
        (
            [job("n", None), job("x", NAN), job("i", -INF), job("a", 5.0)],
            "training",
            "axin",
            "a",
        ),
        ([job("x", NAN)], "training", "x", None),
        ([job("b", 0.5), job("a", 0.5)], "training", "ba", "b"),
        ([job("b", None), job("a", None)], "training", "ba", None),
        ([job("v", None, 0.5), job("a", 0.9)], "training", "av", "a"),
        ([], "training", "", None),
    ],
)
def test_jobs_are_compared_by_one_kind_of_loss(
    jobs: list[SummaryView], kind: str, order: str, best: str | None
) -> None:
    found = compare("lr", jobs, [{}] * len(jobs))
    assert (found.loss_kind, found.best) == (kind, best)
    assert "".join(it.job_id for it in found.jobs) == order


@pytest.mark.parametrize("metric", ["val_loss", "validation_loss", "eval_loss"])
def test_validation_loss_has_three_names(metric: str) -> None:
    one = summary(workers=[rank(metrics={metric: 0.5, "other": 0.1})])
    (row,) = compare("lr", [one], [{}]).jobs
    assert row.loss == 0.5


@pytest.mark.parametrize(
    ("specs", "wanted"),
    [
        ([{"seed": 1, "mode": "m"}, {"seed": 2, "mode": "m"}], [{"seed": 1}, {"seed": 2}]),
        (
            [{"env": {"LR": "1", "A": "x"}}, {"env": {"LR": "2", "A": "x", "B": ""}}],
            [{"env.LR": "1"}, {"env.LR": "2", "env.B": ""}],
        ),
        (
            [
                {"command": ["python", "a.py", "--lr", "-1", "--wd=0", "--of", "a=b"]},
                {"command": ["python", "a.py", "--wd=0", "--lr=-2", "--fast", "--of", "a=b"]},
            ],
            [{"--lr": "-1"}, {"--lr": "-2", "--fast": True}],
        ),
        (
            [{"command": ["python", "a.py"]}, {"command": ["python", "b.py"]}, {"command": None}],
            [{"command": "python a.py"}, {"command": "python b.py"}, {"command": None}],
        ),
        ([{"hosts": ["a"], "seed": 1}], [{}]),
        ([], []),
    ],
)
def test_only_fields_that_differ_are_shown(specs: list[Any], wanted: list[Any]) -> None:
    assert differences(specs) == wanted
