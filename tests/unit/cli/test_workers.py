"""The workers, attempts and audit of a job, in lines and exit codes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from cli.jobs import workers
from cli.jobs.workers import attempt_lines, verdict_of
from cli.main import app
from muster import Client
from tests.support.summaries import JOB, job

WHOLE = {"epoch": 0, "exactly_once": True}
PART = {"epoch": 0, "exactly_once": None}
LATER_PART = {"epoch": 7, "exactly_once": None}

Ask = Callable[..., Result]


@pytest.mark.parametrize(
    ("mode", "status", "exactly_once", "epochs", "words", "code"),
    [
        ("synchronous", "COMPLETED", True, [WHOLE], "a read every sample exactly once", 0),
        ("synchronous", "RUNNING", False, [], "a did NOT read every sample exactly once", 1),
        ("independent", "COMPLETED", None, [], "there is nothing to audit", 2),
        ("synchronous", "RUNNING", None, [PART], "no whole epoch is durable; ask again later", 2),
        ("synchronous", "RUNNING", None, [LATER_PART], "was read exactly once; ask again", 2),
        ("synchronous", "FAILED", None, [PART], "FAILED before its last epoch: no whole", 2),
    ],
)
def test_audit_ends_with_a_verdict_and_its_exit_code(
    mode: str,
    status: str,
    exactly_once: bool | None,  # noqa: FBT001  as the API sends it
    epochs: list[dict[str, bool | None]],
    words: str,
    code: int,
) -> None:
    whole = job(status=status, is_terminal=status in {"COMPLETED", "FAILED"}, spec={"mode": mode})
    sentence, found = verdict_of(whole, {"exactly_once": exactly_once, "epochs": epochs})
    assert found == code
    assert words in sentence


@pytest.mark.parametrize(
    ("bits", "words"),
    [("same", "once"), ("any", "(bits any)"), ("unchecked", "(its script gave check=False)")],
)
def test_the_verdict_says_whether_bits_are_promised(bits: str, words: str) -> None:
    whole = job(status="COMPLETED", is_terminal=True, spec={"mode": "synchronous"})
    audit = {"exactly_once": True, "epochs": [WHOLE], "bits": bits}
    assert verdict_of(whole, audit)[0].endswith(words)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run a command against a server that answers by path."""

    def run(answers: Mapping[str, Any], *words: str) -> Result:
        bodies = {"/jobs/a": {**JOB, "status": "COMPLETED"}, **answers}

        @contextmanager
        def connected() -> Iterator[Client]:
            transport = httpx.MockTransport(
                lambda request: httpx.Response(200, json=bodies[request.url.path])
            )
            with Client("http://api", transport=transport) as client:
                yield client

        monkeypatch.setattr(workers, "connected", connected)
        return CliRunner().invoke(app, words)

    return run


def test_workers_of_an_ended_job_say_so(ask: Ask) -> None:
    ended = {**JOB, "status": "COMPLETED", "is_terminal": True}
    pool = {"workers": [], "world_size": 1}
    shown = ask({"/jobs/a": ended, "/jobs/a/workers": pool}, "workers", "a")
    assert shown.stdout.splitlines()[-1] == "a is COMPLETED, world_size was 1 rank"


def test_workers_show_their_device_and_a_change_under_way(ask: Ask) -> None:
    worker = {"worker_id": "0", "rank": 0, "state": "active", "step": 7, "joined_step": 0}
    worker |= {"pid": 4711, "node": "laptop", "last_heartbeat_age_seconds": 0.1}
    one = {**worker, "gpu_count": 0, "backend": "cpu", "transport": "tcp"}
    other = {**worker, "worker_id": "1", "gpu_count": 2, "backend": "cuda", "transport": "tcp"}
    pool = {"workers": [one, other], "world_size": 3, "active": 2, "is_changing": True}
    shown = ask({"/jobs/a": JOB, "/jobs/a/workers": pool}, "workers", "a").stdout.splitlines()
    assert [line.split()[7] for line in shown[:3]] == ["device", "cpu", "2"]
    assert shown[-1] == "world_size is 3 ranks, active: 2; workers are joining or leaving"
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize(
    ("status", "sentence"), [("QUEUED", "no process yet"), ("STOPPED", "no process was started")]
)
def test_job_without_attempts_says_so(status: str, sentence: str) -> None:
    assert list(attempt_lines(job(status=status), [])) == [f"a is {status}", sentence]
