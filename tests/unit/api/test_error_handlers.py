"""Every exception that leaves a route is one problem document without secrets."""

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from api.access.middleware import AccessMiddleware
from api.access.rate_limits import RateLimiter
from api.errors import Conflict, install, invalid_field
from database.errors import (
    CommitInDoubt,
    DatabaseError,
    DatabaseUnavailable,
    IdempotencyConflict,
    JobExists,
    JobMissing,
    JobNotTerminal,
)
from muster.contracts.errors import FieldProblem, InvalidSpec
from muster.contracts.job import JobId, JobStatus
from muster.contracts.spec import JobRequest
from muster.contracts.spec_problems import field_errors
from tests.unit.api.token_store import OWN_UID, make_authenticator, sent_by

SECRET = "hunter2"  # noqa: S105  must not be shown


def answer_to(error: Exception) -> httpx.Response:
    """Return the response of a service whose route raises `error`."""
    app = FastAPI()
    install(app)

    @app.get("/x")
    async def failing() -> None:
        raise error

    guarded = AccessMiddleware(
        app,
        authenticator=make_authenticator(None),
        limiter=RateLimiter(per_second=1, at_once=1, monotonic=lambda: 0.0),
        hosts=["localhost"],
        requests=Counter(),
    )

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(sent_by(OWN_UID, guarded)), base_url="http://localhost"
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
        (DatabaseUnavailable("locked"), 503, "store-unavailable"),
        (CommitInDoubt("lost"), 503, "commit-in-doubt"),
        (DatabaseError(SECRET), 500, "unexpected"),
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
    assert (answer.status_code, problem["status"]) == (status, status)
    assert problem["type"] == f"/problems/{kind}"
    assert isinstance(problem["detail"], str)
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
    assert SECRET not in answer.text
    assert [log["request_id"] for log in logs] == ([problem["request_id"]] * (status == 500))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("wrold_size", "did you mean 'world_size'?"),
        ("elastic", "write mode: synchronous, virtual_shards: 8 and max_workers: 8"),
        ("nnodes", "write world_size: 2"),
        ("gang", "write restart_scope: gang"),
        ("gpus", "write gpus_per_rank: 1"),
        ("ranks", "write world_size: 2"),
        ("retries", "write max_restarts: 3"),
        ("script", "write command: [python, train.py]"),
        ("zzz", None),
    ],
)
def test_a_field_of_that_meaning_is_suggested(name: str, hint: str | None) -> None:
    (error,) = field_errors({name: 1}, JobRequest)
    assert error.hint == hint
