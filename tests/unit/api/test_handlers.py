"""Every exception that leaves a route is one problem document that tells no secret."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from api.door import Door
from api.handlers import install
from api.identity import Identities
from api.limits import Limits
from api.problems import Conflict, did_you_mean, invalid_field
from muster.contracts.errors import FieldProblem, InvalidSpec
from muster.contracts.job import JobId, JobStatus
from store.clock import utc_now
from store.errors import (
    CommitInDoubt,
    IdempotencyConflict,
    JobExists,
    JobMissing,
    JobNotTerminal,
    StoreError,
    StoreUnavailable,
)

SECRET = "hunter2"  # noqa: S105  what must not be seen


def answer_to(error: Exception) -> httpx.Response:
    """Return what a client gets when a route raises `error`."""
    app = FastAPI()
    install(app)

    @app.get("/x")
    async def failing() -> None:
        raise error

    door = Door(
        app,
        identities=Identities(
            tokens=None, clock=utc_now, own_uid=7, require_token=False, token_sha256=None
        ),
        limits=Limits(per_second=1, at_once=1, monotonic=lambda: 0.0),
        caller_uid=lambda _scope: 7,
        hosts=["localhost"],
    )

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(door), base_url="http://localhost"
        ) as client:
            return await client.get("/x")

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (JobMissing(JobId("a")), 404, "job-not-found"),
        (JobExists(JobId("a")), 409, "job-exists"),
        (JobNotTerminal(JobId("a"), JobStatus.RUNNING), 409, "job-not-over"),
        (IdempotencyConflict("k"), 422, "idempotency-conflict"),
        (StoreUnavailable("locked"), 503, "store-unavailable"),
        (CommitInDoubt("lost"), 503, "commit-in-doubt"),
        (StoreError(SECRET), 500, "unexpected"),
        (RuntimeError(SECRET), 500, "unexpected"),
        (InvalidSpec([FieldProblem("seed", "is odd")]), 422, "invalid-request"),
        (invalid_field("body", "seed", "is odd"), 422, "invalid-request"),
        (Conflict("full", "no room"), 409, "full"),
    ],
)
def test_each_error_has_its_document(error: Exception, status: int, kind: str) -> None:
    with capture_logs(processors=[merge_contextvars]) as logs:
        answer = answer_to(error)
    problem: dict[str, Any] = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, problem["status"], problem["type"]) == (
        status,
        status,
        f"/problems/{kind}",
    )
    assert isinstance(problem["detail"], str)
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert SECRET not in answer.text
    assert [log["request_id"] for log in logs] == ([problem["request_id"]] * (status == 500))


@pytest.mark.parametrize("error", [StoreUnavailable("locked"), CommitInDoubt("lost")])
def test_a_store_that_is_away_says_when_to_try_again(error: StoreUnavailable) -> None:
    assert answer_to(error).headers["retry-after"] == "1"


def test_the_fields_of_a_spec_are_those_of_the_body() -> None:
    answer = answer_to(InvalidSpec([FieldProblem("seed", "is odd"), FieldProblem("env", "bad")]))
    assert [error["loc"] for error in json.loads(answer.text)["errors"]] == [
        ["body", "seed"],
        ["body", "env"],
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("wrold_size", "did you mean 'world_size'?"), ("zzz", None)],
)
def test_near_misses_are_named(name: str, hint: str | None) -> None:
    assert did_you_mean(name, ["seed", "world_size"]) == hint
