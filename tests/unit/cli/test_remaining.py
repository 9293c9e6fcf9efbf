"""What is said while ranks save and exit."""

import httpx
import pytest
from summaries import RANK, SUMMARY

from cli.remaining import ranks_left
from muster import Client


@pytest.mark.parametrize(
    ("living", "said"),
    [
        ([0, 0], ""),
        ([1, 0], "1 rank of 1 job still runs"),
        ([1, 2], "3 ranks of 2 jobs still run"),
    ],
)
def test_those_who_still_run_are_counted(living: list[int], said: str) -> None:
    jobs = [{**SUMMARY, "workers": [{**RANK, "pid": 7}] * count} for count in living]
    answers = httpx.MockTransport(lambda _: httpx.Response(200, json={"jobs": jobs}))
    assert ranks_left(Client("http://api", transport=answers)) == said
