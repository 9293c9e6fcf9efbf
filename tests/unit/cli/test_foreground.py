"""What `muster run` submits, what it resumes, and the environment of its services."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cli.services.following import LEFT_OVER, Follower
from cli.services.foreground import private_environment
from cli.services.terminal import ServiceWarnings
from muster.client import Client
from muster.client.errors import Conflict, NotFound
from muster.contracts.errors import JobDiffers
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import AccessSettings, ServiceSettings
from muster.contracts.views.service import ProblemView
from tests.support.summaries import job

SPEC = JobSpec(command=("true",), world_size=1)


class Api:
    """A client of an API that has one unfinished job, or left-over checkpoints of a job."""

    def __init__(self, stored: dict[str, Any] | None) -> None:
        self.stored = stored
        self.submitted: list[dict[str, Any]] = []

    def named(self, job_id: str) -> Any:  # noqa: ANN401  part of a job
        if self.stored is None:
            raise NotFound(ProblemView(status=404, detail=""))
        view = job(job_id=job_id, spec=self.stored)
        return SimpleNamespace(view=view, is_terminal=False)

    def submit(self, body: dict[str, Any], **fields: object) -> None:
        self.submitted.append(body | fields)
        if self.submitted[-1]["resume_from"] is None:
            raise Conflict(ProblemView(status=409, detail="", type=LEFT_OVER))


def submit(directory: Path, stored: dict[str, Any] | None, **fields: object) -> Api:
    api = Api(stored)
    spec = msgspec.structs.replace(SPEC, **fields)
    Follower(JobId("one"), spec, DataDir(directory)).submit(cast(Client, api))
    return api


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The spec of an unfinished job, as the API shows it."""
    monkeypatch.chdir(tmp_path)
    places = {"dataset_dir": "/data", "checkpoint_dir": "/c", "working_dir": str(tmp_path)}
    return {**msgspec.json.decode(msgspec.json.encode(SPEC)), **places}


def test_an_unfinished_job_is_resumed_not_submitted(tmp_path: Path, stored: dict[str, Any]) -> None:
    # A pause after each step has no effect on the result.
    assert not submit(tmp_path, stored, sleep_sec=1.0).submitted


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"max_restarts": 0}, "max_restarts"),
        ({"restart_scope": "gang", "command": ("false",)}, "command, restart_scope"),
        ({"env": {"A": "b"}}, "env"),
        ({"world_size": 2}, "world_size"),
        ({"dataset_dir": "/elsewhere"}, "dataset_dir"),
        ({"working_dir": "/"}, "working_dir"),
    ],
)
def test_an_unfinished_job_resumes_only_with_its_own_spec(
    tmp_path: Path, stored: dict[str, Any], fields: dict[str, Any], names: str
) -> None:
    with pytest.raises(JobDiffers, match=f"another {names} and is"):
        submit(tmp_path, stored, **fields)


def test_the_same_id_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    asked = submit(tmp_path, None).submitted
    assert [body["resume_from"] for body in asked] == [None, "one"]


def test_private_services_have_no_settings_of_shared_ones(tmp_path: Path) -> None:
    shared = {
        "MUSTER_TLS_CERTFILE": "cert.pem",
        "MUSTER_REQUIRE_TOKEN": "1",
        "MUSTER_SECRET_ENV": "HF_TOKEN",
        "MUSTER_CLUSTER": "cluster.yaml",
        "MUSTER_AGENT_ADDRESS": "10.0.0.1:7400",
        "MUSTER_HOST": "0.0.0.0",  # noqa: S104  not used
        "JOB_ID": "other",
        "HF_TOKEN": "of this shell",
    }
    environ = private_environment(shared, tmp_path, 3)
    access, settings = AccessSettings.read(environ), ServiceSettings.read(environ, cores=1)
    assert (access.tls_certfile, access.require_token) == (None, False)
    assert (settings.cluster, settings.agent_address, settings.host) == (None, None, "127.0.0.1")
    assert (settings.slots, settings.data_dir) == (3, tmp_path)
    assert settings.checkpoint_dir == Path.cwd() / "checkpoints"
    assert environ["HF_TOKEN"] == "of this shell"  # noqa: S105  not secret
    assert not {"JOB_ID", "MUSTER_SECRET_ENV"} & environ.keys()


def test_warnings_of_the_services_are_printed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "up.log"
    log.write_text('{"level": "warning", "event": "of an earlier run"}\n')
    warnings = ServiceWarnings(log)
    full = '{"level": "warning", "event": "the database is away", "error": "no room left"}\n'
    with log.open("a") as file:
        file.write('{"level": "info", "event": "the job is RUNNING"}\nTraceback\n' + full + full)
        file.write('{"level": "warning", "event": "not all of')
    warnings.show()
    warnings.show()
    assert capsys.readouterr().err == "muster: the database is away: no room left\n"
