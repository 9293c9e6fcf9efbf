"""Ranks get their secrets, which appear only in a rank's own log."""

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.contracts.job.secrets import SHARED_VARIABLES as LENT_NAMES
from muster.host.containment import tagged_processes
from muster.host.processes import send_signal
from muster.runtime.secrets import SecretStore
from tests.support.installation import (
    DEADLINE_SECONDS,
    Installation,
    await_value,
    is_running,
    lent,
    restarts,
)

KEPT = "kept-in-a-file-4d1f"
LENT = "lent-by-the-service-9c2e"

SHOW = (
    "import hashlib, os; "
    "show = lambda name: print("
    "name, hashlib.sha256(os.environ.get(name, '').encode()).hexdigest(), flush=True); "
)
"""Prints a hash that identifies a secret without showing it."""


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def _lending(tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path) -> Iterator[Installation]:
    settings = {
        "DATASET_DIR": str(dataset_dir),
        LENT_NAMES: "LENT_VARIABLE",
        "LENT_VARIABLE": LENT,
        "NOT_LENT": "not lent to jobs",
    }
    with Installation(tmp_path_factory.mktemp("lending"), **settings) as installation:
        yield installation


@pytest.fixture
def lending(_lending: Installation) -> Iterator[Installation]:
    """An installation with a secret in a file and one in its environment."""
    SecretStore(_lending.files.secrets).put("kept", KEPT)
    yield from lent(_lending)


def python(*words: str) -> list[str]:
    return [sys.executable, "-c", "".join(words)]


def test_a_command_finds_its_secrets_in_its_environment(lending: Installation) -> None:
    job_id = lending.submit(
        world_size=2,
        command=python(SHOW, "show('A'); show('B'); show('LENT_VARIABLE')"),
        secrets={"A": "file:kept", "B": "env:LENT_VARIABLE"},
    )
    lending.complete(job_id)
    for rank in range(2):
        assert f"A {sha256(KEPT)}" in lending.log(job_id, rank)
        assert f"B {sha256(LENT)}" in lending.log(job_id, rank)
        # The variable itself is not inherited.
        assert f"LENT_VARIABLE {sha256('')}" in lending.log(job_id, rank)
    spec = lending.job(job_id)["spec"]
    assert spec["secrets"] == {"A": "file:kept", "B": "env:LENT_VARIABLE"}


def test_a_stored_secret_is_named_at_submission(lending: Installation) -> None:
    def muster(*words: str, standard_input: str | None = None) -> str:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "cli", *words],
            env={**lending.environment, "MUSTER_URL": lending.url},
            input=standard_input,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    muster("secret", "set", "typed", standard_input="typed-by-a-person\n")
    assert "typed" in muster("secret", "ls").splitlines()
    job_id = muster(
        *("submit", "--secret", "A=file:typed", "--set", "world_size=1", "-d", "--"),
        *python(SHOW, "show('A')"),
    ).strip()
    lending.note(lending.job(job_id))
    lending.complete(job_id)
    assert f"A {sha256('typed-by-a-person')}" in lending.log(job_id)
    assert "typed-by-a-person" not in muster("show", job_id, "-o", "json")


def test_a_program_trained_together_finds_them_too(lending: Installation, tmp_path: Path) -> None:
    program = tmp_path / "telling.py"
    program.write_text(f"{SHOW}\nshow('A')\nfrom muster.training.classifier import Classifier\n")
    job_id = lending.submit(
        mode="synchronous",
        world_size=2,
        program="telling.py:Classifier",
        working_dir=str(tmp_path),
        secrets={"A": "file:kept"},
    )
    lending.complete(job_id)
    assert f"A {sha256(KEPT)}" in lending.log(job_id)


def test_a_restarted_rank_gets_its_secrets_from_a_new_agent(lending: Installation) -> None:
    job_id = lending.submit(
        world_size=1,
        command=python(SHOW, "show('A'); import time; time.sleep(600)"),
        secrets={"A": "file:kept"},
    )
    _told(lending, job_id, times=1)
    lending.restart_coordinator()
    lending.kill(job_id, 0)
    lending.wait_until(job_id, restarts(1))
    _told(lending, job_id, times=2)


def _told(lending: Installation, job_id: str, times: int) -> None:
    """Wait until the job's rank has shown the secret so often; it runs for longer than that."""
    await_value(
        lambda: lending.log(job_id).count(sha256(KEPT)) == times,
        lambda: lending.describe(job_id),
    )


def test_a_secret_that_is_not_lent_fails_the_job(lending: Installation) -> None:
    secrets = {"A": "env:NOT_LENT"}
    job = lending.fail(lending.submit(world_size=1, command=["true"], secrets=secrets))
    assert job["reason"] == "secret_unavailable"
    assert "the secret env:NOT_LENT is not available to jobs" in job["message"]
    assert "not lent to jobs" not in job["message"]


def test_a_removed_or_readable_secret_fails_the_next_start(
    lending: Installation,
) -> None:
    job_id = lending.submit(
        world_size=1,
        command=python("import time; time.sleep(600)"),
        secrets={"A": "file:kept"},
    )
    lending.wait_until(job_id, is_running)
    (lending.files.secrets / "kept").chmod(0o644)
    lending.kill(job_id, 0)
    job = lending.fail(job_id)
    assert job["reason"] == "secret_unavailable"
    assert "has mode 0644, so other users" in job["message"]
    assert lending.see(job_id)["restarts"] == 1


def test_a_missing_secret_is_refused_with_the_job(lending: Installation) -> None:
    body = {"command": ["true"], "secrets": {"A": "file:none"}}
    answer = lending.request("POST", "/jobs", json=body)
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["loc"] == ["body", "secrets"]
    assert "`muster secret set none`" in error["msg"]


def test_a_secret_in_a_crash_message_is_redacted(lending: Installation) -> None:
    write_down = (
        "import json, os; told = 'refused: ' + os.environ['A']; "
        "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(json.dumps({'message': told})); "
        "raise SystemExit(told)"
    )
    job_id = lending.submit(
        world_size=1, max_restarts=1, command=python(write_down), secrets={"A": "file:kept"}
    )
    job = lending.fail(job_id)
    assert "refused: [secret]" in job["message"]
    _is_in_its_log_alone(lending, job_id)


def test_a_changed_secret_is_redacted_by_the_next_agent(
    lending: Installation, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    (tmp_path / "waiting.py").write_text(
        "import os, pathlib, time; print('here')\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        "print(os.environ['A']); os._exit(3)\n"
    )
    job_id = lending.submit(
        mode="synchronous",
        world_size=1,
        max_restarts=0,
        program="waiting.py:Program",
        working_dir=str(tmp_path),
        secrets={"A": "file:kept"},
    )
    await_value(lambda: "here" in lending.log(job_id), lambda: lending.describe(job_id))
    SecretStore(lending.files.secrets).put("kept", "another since then")
    (agent,) = tagged_processes(f"{lending.uids[job_id]}/agent")
    send_signal(agent, signal.SIGKILL)
    lending.wait_until(job_id, lambda _: "agent_adopted" in lending.kinds(job_id))
    go.touch()
    lending.fail(job_id)
    _is_in_its_log_alone(lending, job_id)


def _is_in_its_log_alone(lending: Installation, job_id: str) -> None:
    told = [lending.job(job_id), lending.see(job_id), *lending.events(job_id)]
    told.append(lending.request("GET", f"/jobs/{job_id}/attempts").text)
    assert KEPT not in str(told)
    assert KEPT in lending.log(job_id)
    ends = [end.read_bytes() for end in lending.files.job(job_id).exits.glob("*.exit")]
    assert ends
    assert all(KEPT.encode() not in end and b"[secret]" in end for end in ends)


def test_a_key_in_the_environment_causes_a_warning(lending: Installation) -> None:
    job_id = lending.submit(world_size=1, command=["true"], env={"HF_TOKEN": "x" * 20})
    submitted, *_ = lending.events(job_id)
    assert "env shows HF_TOKEN" in f"{submitted['message']} {lending.job(job_id)['message']}"


def test_services_refuse_to_lend_their_own_keys(tmp_path: Path) -> None:
    installation = Installation(tmp_path, **{LENT_NAMES: "MUSTER_TOKEN"})
    installation.api.start()
    assert installation.api.process is not None
    assert installation.api.process.wait(60) == 1
    assert LENT_NAMES in installation.api.log.read_text()
    installation.api.process = None
