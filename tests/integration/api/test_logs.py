"""The last lines of a log: filters and formats."""

import json
from typing import Any

import httpx
import pytest

from muster.contracts.job.status import JobStatus
from tests.support.api_service import Agent, StandIn
from tests.support.log_follower import events

BEGAN = 1_700_000_000
"""2023-11-14T22:13:20Z"""

MICROS = 1_000_000


def at(seconds: float) -> int:
    return round((BEGAN + seconds) * MICROS)


def moment(seconds: int) -> str:
    return f"2023-11-14T22:13:{20 + seconds}Z"


@pytest.fixture
def logged(agent: Agent, job: str) -> str:
    """A job with two attempts of rank 0, and an unfinished line of rank 1."""
    agent.write(job, 0, "a loss=1\n", at_micros=at(1))
    agent.write(job, 0, "b\n", at_micros=at(3))
    agent.write(job, 0, "c loss=2\n", at_micros=at(5), attempt=1)
    agent.write(job, 1, "d\n", at_micros=at(2))
    agent.write(job, 1, "e loss=3")
    return job


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, "adbce"),
        ({"tail": 0}, ""),
        ({"since": moment(2)}, "dbce"),
        ({"since": moment(6)}, "e"),
        ({"until": moment(3)}, "adb"),
        ({"until": moment(0)}, ""),
        ({"since": moment(2), "until": moment(2)}, "d"),
        ({"since": "2023-11-14T23:13:23+01:00"}, "bce"),
        ({"grep": "loss="}, "ace"),
        ({"grep": "loss=", "tail": 2}, "ce"),
        ({"grep": ".*"}, ""),
        ({"attempt": 0}, "adbe"),
        ({"attempt": 1}, "c"),
        ({"attempt": 1, "rank": 1}, ""),
        ({"after": "0.0:9"}, "dbce"),
        ({"after": "0.1:0,1.0:2"}, "ce"),
        ({"after": "0.1:9,1.0:2", "grep": "c"}, ""),
    ],
)
def test_each_filter_selects_its_lines(
    client: httpx.Client, logged: str, params: dict[str, Any], expected: str
) -> None:
    found = client.get(f"/jobs/{logged}/logs", params=params).json()["lines"]
    assert "".join(line["line"][0] for line in found) == expected


def test_ndjson_has_one_object_per_line(client: httpx.Client, logged: str) -> None:
    headers = {"Accept": "application/x-ndjson"}
    answer = client.get(f"/jobs/{logged}/logs?tail=2", headers=headers)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line) for line in answer.text.splitlines()] == [
        {"rank": 0, "time": moment(5), "line": "c loss=2"},
        {"rank": 1, "time": None, "line": "e loss=3"},
    ]


def test_follow_is_the_stream(client: httpx.Client, stand_in: StandIn, logged: str) -> None:
    stand_in.move(logged, JobStatus.STOPPED)
    params = {"follow": "true", "rank": 0, "after": "0.0:9"}
    with client.stream("GET", f"/jobs/{logged}/logs", params=params) as response:
        found = list(events(response.iter_raw()))
    assert [line for event in found if not event.kind for line in event.data] == ["b", "c loss=2"]
    assert found[-1].kind == "end"
    again = client.get(f"/jobs/{logged}/logs?follow=true", headers={"Last-Event-ID": found[-1].id})
    assert again.status_code == 200, "the position has one rank only"
