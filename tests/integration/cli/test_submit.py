"""``muster submit``, from the command line to the database."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import httpx
import msgspec
import pytest
from click.testing import CliRunner, Result

from cli.errors import ExitCode
from cli.main import app
from database.jobs import JobQuery
from database.records import Event, Job, utc_now
from muster import Client
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, Reason
from muster.contracts.views.job import AgentRequest, JobPlan
from tests.support.api_service import DEADLINE_SECONDS, Agent, Service, StandIn
from tests.support.database_samples import worker

Muster = Callable[..., Result]


class Watching:
    """A command that stays until its job is over."""

    def __init__(self, service: Service, directory: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli", "submit", "--set", "world_size=4", *words],
            env={**os.environ, "MUSTER_URL": service.url},
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.job_id = self.process.stdout.readline().strip()

    def see(self, text: str) -> None:
        """Wait until it says so."""
        assert self.process.stderr is not None
        assert any(text in line for line in self.process.stderr)

    def ended(self) -> tuple[int, str, str]:
        """Return its exit code, and what else it printed on standard output and error."""
        printed, said = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, printed, said


@pytest.fixture
def submitted(muster: Muster, stand_in: StandIn) -> Callable[..., Job]:
    """Submit without watching, and return what is in the store."""

    def job(*words: str) -> Job:
        result = muster("submit", "-d", *words)
        assert result.exit_code == ExitCode.OK, result.stderr
        return stand_in.jobs.get(JobId(result.stdout.strip()))

    return job


def test_command_runs_in_the_current_directory(
    submitted: Callable[..., Job], tmp_path: Path, name: str
) -> None:
    (tmp_path / "train.py").touch()
    job = submitted(
        "--id", name, "-n", "2", "-e", "LR=1", "--", "python", "train.py", "-d", "--", "x"
    )
    assert job.job_id == name
    assert job.spec.command == ("python", "train.py", "-d", "--", "x")
    assert (job.world_size, job.spec.env) == (2, {"LR": "1"})
    assert job.spec.working_dir == str(tmp_path)


def test_variables_have_their_values_from_here_and_from_files(
    submitted: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", "a = b")
    for number in "12":
        lines = f"FILE={number}\n\n  export QUOTED='x y'\nHERE\nRAW={{\"a\": '1'}}\n"
        (tmp_path / number).write_text(f"\ufeff# of file {number}\n{lines}")
    job = submitted(
        "--env-file", "1", "--env-file", "2", "-e", "HERE=c", "-e", "HERE", "--", "true"
    )
    expected = {"FILE": "2", "QUOTED": "x y", "RAW": "{\"a\": '1'}", "HERE": "a = b"}
    assert job.spec.env == expected


def test_a_variable_without_a_value_is_refused(muster: Muster, tmp_path: Path) -> None:
    (tmp_path / "variables").write_text("A=1\n= 2\n")
    for words, said in (
        (["-e", "NOPE"], "'NOPE' is not NAME[=VALUE], or not set here"),
        (["--env-file", "variables"], "variables, line 2: expected NAME=VALUE, or a NAME that is"),
    ):
        refused = muster("submit", *words, "--", "true")
        assert refused.exit_code == ExitCode.USAGE
        assert said in refused.stderr


def test_a_key_of_the_shell_is_not_shown(muster: Muster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    refused = muster("submit", "-e", "WANDB_API_KEY", "--", "true")
    assert refused.exit_code == ExitCode.USAGE
    assert "muster secret set WANDB_API_KEY, then --secret WANDB_API_KEY=file:" in refused.stderr
    assert "hunter2" not in refused.stderr


def test_gang_starts_all_ranks_again(submitted: Callable[..., Job]) -> None:
    assert submitted("--gang", "--", "true").spec.restart_scope == "gang"
    assert submitted("--", "true").spec.restart_scope == "rank"


def test_command_gets_one_rank(submitted: Callable[..., Job], tmp_path: Path) -> None:
    assert submitted("--", "true").world_size == 1
    assert submitted("--set", "world_size=3", "--", "true").world_size == 3
    (tmp_path / "job.yaml").write_text("world_size: 2\n")
    assert submitted("job.yaml", "--", "true").world_size == 2


def test_option_overrides_the_file(submitted: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "shards/here").mkdir(parents=True)
    (tmp_path / "shards/here/shard_00000.txt").write_text("line\n")
    (tmp_path / "job.yaml").write_text(
        "name: digits\nworld_size: 4\nseed: 1\ndataset_dir: shards/here\n"
        "checkpoint_dir: ~/saved\nenv: {A: a, B: b}\n"
    )
    words = ("--set", "seed=7", "-n", "2", "-e", "B=c", "--set", "labels={x: 1:30}")
    job = submitted("job.yaml", *words)
    assert (job.spec.name, job.spec.seed, job.spec.world_size) == ("digits", 7, 2)
    assert job.spec.env == {"A": "a", "B": "c"}
    assert job.spec.labels == {"x": "1:30"}
    assert job.spec.dataset_dir == str(tmp_path / "shards/here")
    assert job.spec.checkpoint_dir == str(tmp_path / "saved")


@pytest.fixture(params=[()])
def watching(
    request: pytest.FixtureRequest, service: Service, stand_in: StandIn, tmp_path: Path
) -> Iterator[Watching]:
    submit = Watching(service, tmp_path, *request.param)
    yield submit
    submit.process.kill()
    submit.process.communicate()
    stand_in.end(submit.job_id)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (
            "name: a\nworld_siz: 4\n",
            ["job.yaml"],
            "job.yaml:2:1: world_siz: there is no such field (did you mean 'world_size'?)",
        ),
        ("command:\n- python\n- 7\n", ["job.yaml"], "job.yaml:3:3: command.1: "),
        ('name: "\\e[2J"\n', ["job.yaml"], "job.yaml:1:1: name: "),
        ("epochs: 3\n", ["job.yaml", "--set", "epochs=x"], "muster: epochs: "),
        ("", ["."], "muster: . is not a job file"),
        ("", ["gone.yaml"], "muster: gone.yaml cannot be read: No such file or directory"),
        ("a: [1\n", ["job.yaml"], "job.yaml:2:1: "),
        ("", ["--set", "dataset_dir=nowhere"], "nowhere does not exist: make one with muster "),
        ("", ["--set", "labels=&a [*a]", "--", "true"], "this request "),
        ("", ["--set", "labels=&a {b: [*a]}", "--", "true"], "this request "),
        ("", ["--set", "labels={a: .nan}", "--", "true"], "labels.a: expected text"),
        ("", ["--", "python", "trian.py"], "muster: command: there is no trian.py in "),
        ("", ["--env-file", "gone", "--", "true"], "muster: gone: No such file or directory"),
        (
            "export HF_TOKEN='x'\n",
            ["--env-file", "job.yaml", "--", "true"],
            "looks like a key, which env would show to others: muster secret set HF_TOKEN, then ",
        ),
        ("command: [pyhton]\n", ["job.yaml"], "job.yaml:1:1: command: pyhton is not found"),
    ],
)
def test_invalid_job_is_refused_and_not_submitted(
    muster: Muster, stand_in: StandIn, tmp_path: Path, text: str, words: list[str], said: str
) -> None:
    (tmp_path / "job.yaml").write_text(text)
    before = stand_in.jobs.count(JobQuery())
    result = muster("submit", "-d", *words)
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert said in result.stderr
    assert result.stderr.startswith(("muster: ", "job.yaml:"))
    assert stand_in.jobs.count(JobQuery()) == before


def test_dry_run_prints_the_plan_and_submits_nothing(
    muster: Muster, stand_in: StandIn, tmp_path: Path, name: str
) -> None:
    before = stand_in.jobs.count(JobQuery())
    planned = muster("submit", "--dry-run", "--id", name, "-n", "3", "--set", "epochs=2")
    assert planned.exit_code == ExitCode.OK
    facts = dict(line.split("  ", 1) for line in planned.stdout.splitlines()[:-1])
    assert (facts["job"].strip(), facts["ranks"].strip()) == (name, "3, synchronous")
    assert facts["shards"].strip() == "32: 10 to 11 for each rank"
    assert planned.stdout.splitlines()[-1] == "nothing was submitted: omit --dry-run to submit"
    (tmp_path / "job.yaml").write_text("command: [python, -c, pass]\nworld_siz: 2\n")
    refused = muster("submit", "--dry-run", "job.yaml")
    assert (refused.exit_code, refused.stdout) == (ExitCode.USAGE, "")
    assert refused.stderr.startswith("job.yaml:2:1: world_siz")
    told = muster("submit", "--dry-run", "-o", "json", "--", "echo", "a b")
    assert json.loads(told.stdout)["command"] == ["echo", "a b"]
    assert "dataset in" not in muster("submit", "--dry-run", "--", "true").stdout
    (tmp_path / "train.py").touch()
    copied = muster("submit", "--dry-run", "--snapshot", "train.py").stdout
    assert "code           a copy, as it is at submission\n" in copied
    named = muster("submit", "--dry-run", "--set", f"dataset_dir={tmp_path}", "--", "true")
    assert f"dataset in     {tmp_path}" in named.stdout
    assert stand_in.jobs.count(JobQuery()) == before


@pytest.mark.parametrize(("engine", "named"), [("kubernetes", 0), ("slurm", 1)])
def test_an_image_has_a_python_of_its_own(
    monkeypatch: pytest.MonkeyPatch, engine: str, named: int
) -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(422, json={"detail": "no"})

    client = Client("http://api", transport=httpx.MockTransport(answer))
    monkeypatch.setattr("cli.jobs.submit.connected", lambda *_: nullcontext(client))
    words = ["submit", "--dry-run", "--engine", engine, "--", "python", "train.py"]
    CliRunner().invoke(app, words)
    assert [len({"python"} & body.keys()) for body in bodies] == [named]


def test_dry_run_shows_what_a_scheduler_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "#!/bin/sh\nexec x\n"
    request = AgentRequest(engine="slurm", command=["sbatch", "--job-name=a b"], content=script)
    plan = JobPlan(
        job_id="mine",
        message=None,
        launcher="slurm",
        request=request,
        world_size=1,
        command=["true"],
        program=None,
        shards=None,
        shards_per_rank=None,
        spec=msgspec.to_builtins(JobSpec(engine="slurm", command=("true",))),
    )
    answer = httpx.Response(200, json=msgspec.to_builtins(plan))
    client = Client("http://api", transport=httpx.MockTransport(lambda _: answer))
    monkeypatch.setattr("cli.jobs.submit.connected", lambda *_: nullcontext(client))
    words = ["submit", "--dry-run", "--engine", "slurm", "--", "true"]
    shown = CliRunner().invoke(app, words).stdout
    assert "started by  slurm\n" in shown
    assert f"\nsbatch '--job-name=a b'\n\n{script}" in shown


def test_submit_prints_the_notes_of_the_server(
    muster: Muster, stand_in: StandIn, name: str
) -> None:
    said = muster("submit", "-d", "--id", name, "-e", "HF_TOKEN=x", "--", "true")
    assert said.stdout == f"{name}\n"
    note, lines = said.stderr.splitlines()
    assert note.startswith("note: env shows HF_TOKEN to everyone who may submit jobs")
    assert lines == f"Logs: muster logs -f {name}"
    (event,) = [it for it in muster("events", name).stdout.splitlines() if "HF_TOKEN" in it]
    assert "the job was submitted: env shows HF_TOKEN" in event
    stand_in.end(name)


APART = (
    "unless it uses torch.distributed, each of the 2 ranks trains its own model; for one model use "
    "--program, or --gang with torch.distributed"
)
FOR_ELASTIC = "train.py uses muster.torch: use --elastic, so that all ranks train one model"
FOR_GANGS = "train.py uses torch.distributed: use --gang, so that all restart if one dies"


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("import muster\n", ["-n", "2"], [APART]),
        ("import torch.distributed as dist\n", ["-n", "2"], [FOR_GANGS]),
        ("import muster\nfrom torch import distributed\n", ["-n", "2"], [FOR_GANGS]),
        ("import muster\nimport torch.distributed\n", ["-n", "2", "--gang"], []),
        ("import muster\n", [], []),
        (
            "import muster\nfrom muster.torch.lightning import MusterCallback\n",
            ["-n", "2"],
            [FOR_GANGS],
        ),
        ("import muster\nfrom muster.torch.huggingface import *\n", ["--gang"], []),
        ("import muster.torch\n\nfor x in run.shards():\n    pass\n", ["--gang"], [FOR_ELASTIC]),
        ("# import muster, torch.distributed\n", ["-n", "2"], []),
    ],
)
def test_ranks_that_train_apart_are_noted(
    muster: Muster,
    service: Service,
    tmp_path: Path,
    name: str,
    text: str,
    words: list[str],
    said: list[str],
) -> None:
    (tmp_path / "train.py").write_text(text)
    planned = muster("submit", "--dry-run", *words, "train.py").stdout
    assert [line for line in planned.splitlines() if line.startswith("note")] == [
        f"note           {it}" for it in said
    ]
    submitted = muster("submit", "-d", "--id", name, *words, "train.py").stderr
    saves = [f"checkpoints go to {service.root}/checkpoints/{name}"]
    expected = [*said, *(saves if text.startswith("import muster") else [])]
    assert submitted.splitlines()[:-1] == [f"note: {it}" for it in expected]


@pytest.mark.parametrize(
    ("status", "code"),
    [(JobStatus.COMPLETED, ExitCode.OK), (JobStatus.FAILED, ExitCode.FAILED)],
)
def test_attached_submit_exits_with_the_job(
    watching: Watching, stand_in: StandIn, status: JobStatus, code: ExitCode
) -> None:
    stand_in.run(watching.job_id)
    stand_in.move(watching.job_id, status)
    ended, _, said = watching.ended()
    assert ended == code
    assert f"{watching.job_id} is {status}" in said
    assert said.splitlines()[-1] == f"Logs: muster logs -f {watching.job_id}"


def test_attached_submit_shows_logs_and_events(
    watching: Watching, stand_in: StandIn, agent: Agent
) -> None:
    why = "waits for 4 of 4 slots"
    stand_in.move(watching.job_id, JobStatus.QUEUED, message=why, reason=Reason.WAITING_FOR_SLOTS)
    watching.see(f"{watching.job_id} is QUEUED: {why}")
    stand_in.run(watching.job_id, worker(0), worker(1))
    agent.write(
        watching.job_id, 1, "step 1\n" + 2 * "Traceback (most recent call last):\nOSError\n"
    )
    lost = Event(at=utc_now(), kind="job_recovering", message="rank 0 was lost")
    stand_in.write(watching.job_id, events=[lost])
    watching.see("muster: rank 0 was lost")
    message = "the end of its log:\n  Traceback (most recent call last):\n  OSError"
    stand_in.move(watching.job_id, JobStatus.FAILED, message=message)
    code, printed, said = watching.ended()
    assert code == ExitCode.FAILED
    first, *shown = printed.splitlines()
    assert (first, shown[0]) == ("[rank 1] step 1", "[rank 1] Traceback (most recent call last):")
    assert shown[1:] == ["[rank 1] OSError", "[rank 1] OSError (as above)"]
    assert "the end of its log:\n  OSError (as above)\n" in said


@pytest.mark.parametrize("watching", [("--no-logs",), ("-o", "name")], indirect=True)
def test_progress_instead_of_logs_until_ctrl_c_detaches(
    watching: Watching, stand_in: StandIn, agent: Agent
) -> None:
    watching.see("0/4 ranks")
    agent.write(watching.job_id, 0, "step 1\n")
    watching.process.send_signal(signal.SIGINT)
    code, printed, said = watching.ended()
    assert (code, printed) == (ExitCode.INTERRUPTED, "")
    assert f"muster logs -f {watching.job_id}" in said
    assert f"muster stop {watching.job_id}" in said
    assert stand_in.jobs.get(JobId(watching.job_id)).status is JobStatus.QUEUED


def test_ctrl_c_among_logs_detaches(watching: Watching, stand_in: StandIn) -> None:
    stand_in.run(watching.job_id)
    stand_in.write(watching.job_id, events=[Event(at=utc_now(), kind="x", message="seen")])
    watching.see("seen")
    watching.process.send_signal(signal.SIGINT)
    code, _, said = watching.ended()
    assert code == ExitCode.INTERRUPTED
    assert said.startswith(f"detached: {watching.job_id} continues\n")
