"""What is said of a pool and of an audit, in sentences and exit codes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import typer
from summaries import JOB, job

from cli import pool
from cli.pool import SUSPECT_AGENTS, audit, counted, verdict_of, workers
from muster import Client

WHOLE = {"epoch": 0, "exactly_once": True}
PART = {"epoch": 0, "exactly_once": None}
LATER_PART = {"epoch": 7, "exactly_once": None}


@pytest.mark.parametrize(
    ("mode", "status", "exactly_once", "epochs", "sentence", "code"),
    [
        ("synchronous", "COMPLETED", True, [WHOLE], "a read every sample exactly once", 0),
        ("synchronous", "RUNNING", False, [], "a did NOT read every sample exactly once", 1),
        (
            "independent",
            "COMPLETED",
            None,
            [],
            "a trains its ranks independently: there is nothing to audit",
            2,
        ),
        (
            "synchronous",
            "RUNNING",
            None,
            [PART],
            "a is RUNNING: no whole epoch is durable yet, ask again",
            2,
        ),
        (
            "synchronous",
            "RUNNING",
            None,
            [LATER_PART],
            (
                "a is RUNNING: every whole epoch that is durable was read exactly once, "
                "and more are to come, ask again"
            ),
            2,
        ),
        (
            "synchronous",
            "FAILED",
            None,
            [PART],
            "a is FAILED, before its end: no whole epoch is durable",
            2,
        ),
    ],
)
def test_an_audit_ends_with_one_sentence_and_its_exit_code(
    mode: str,
    status: str,
    exactly_once: bool | None,  # noqa: FBT001  as the API says it
    epochs: list[dict[str, bool | None]],
    sentence: str,
    code: int,
) -> None:
    whole = job(status=status, is_terminal=status in {"COMPLETED", "FAILED"}, spec={"mode": mode})
    audit = {"exactly_once": exactly_once, "epochs": epochs}
    assert verdict_of(whole, audit) == (sentence, code)


def test_one_rank_is_one() -> None:
    assert [counted(ranks) for ranks in (1, 2)] == ["1 rank", "2 ranks"]


def serve(monkeypatch: pytest.MonkeyPatch, found: Mapping[str, Any]) -> None:
    """Let the commands talk to a server that says what it is told to, by path."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, json={"/jobs/a": {**JOB, "status": "COMPLETED"}, **found}[request.url.path]
        )

    @contextmanager
    def connected() -> Iterator[Client]:
        with Client("http://api", transport=httpx.MockTransport(answer)) as client:
            yield client

    monkeypatch.setattr(pool, "connected", connected)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({}, []),
        ({"agent": None}, []),
        ({"agent": "running"}, []),
        *[({"agent": state}, [sentence]) for state, sentence in SUSPECT_AGENTS.items()],
    ],
    ids=["an older server's", "none", "running", *SUSPECT_AGENTS],
)
def test_an_agent_that_does_not_do_its_part_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    agent: dict[str, str | None],
    said: list[str],
) -> None:
    serve(monkeypatch, {"/jobs/a/workers": {"workers": [], "world_size": 2, **agent}})
    workers("a")
    assert capsys.readouterr().out.splitlines()[-1 - len(said) :] == ["2 ranks are wanted", *said]


def test_a_job_that_is_over_wants_nobody_any_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = {**JOB, "status": "COMPLETED", "is_terminal": True}
    pool = {"workers": [], "world_size": 4, "agent": "gone"}
    serve(monkeypatch, {"/jobs/a": over, "/jobs/a/workers": pool})
    workers("a")
    assert capsys.readouterr().out.splitlines()[-1] == "a is COMPLETED: 4 ranks were wanted"


def test_an_audit_of_an_older_server_is_shown_without_what_it_omits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = {"samples": 8, "expected_samples": 8, "hash": "1f", "expected_hash": "1f"}
    saved = {"step": 4, "epoch": 0, "generation": 1, "digest": "2e", "saved_at": "2026-01-01T12:00"}
    found = {"exactly_once": True, "epochs": [{**WHOLE, **read}], "checkpoints": [saved]}
    serve(monkeypatch, {"/jobs/a/audit": found})
    with pytest.raises(typer.Exit):
        audit("a")
    assert "not shown" not in capsys.readouterr().out
