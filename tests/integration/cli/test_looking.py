"""The commands that look at jobs and stop them, from the command line to the database."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import httpx
import pytest
from click.testing import Result
from ruamel.yaml import YAML

import cli.jobs.lifecycle
from cli.errors import ExitCode
from cli.jobs.show import RUNS_WIDTH
from database.records import Event, utc_now
from muster.contracts.job.status import JobId, JobStatus
from tests.support.api_service import Agent, Service, StandIn
from tests.support.database_samples import worker
from tests.support.installation import await_value

Muster = Callable[..., Result]


@pytest.fixture
def other(client: httpx.Client, stand_in: StandIn, name: str) -> Iterator[str]:
    """A second job."""
    client.post("/jobs", json={"job_id": f"{name}-2"}).raise_for_status()
    yield f"{name}-2"
    stand_in.end(f"{name}-2")


def test_ps_lists_newest_jobs_first(muster: Muster, stand_in: StandIn, job: str) -> None:
    stand_in.run(job, worker(0, step=7, total_steps=10, loss=0.5), worker(1))
    header, first, *_ = muster("ps").stdout.splitlines()
    assert header.split() == [
        "job", "status", "ranks", "step", "loss", "steps/s", "ETA", "restarts", "age",
    ]  # fmt: skip
    assert first.split()[:3] == [job, "RUNNING", "2/2"]
    only = muster("ls", "--status", "running", "-o", "name")
    assert only.stdout.splitlines()[0] == job


def test_ps_counts_the_jobs_beyond_the_limit(muster: Muster, job: str, other: str) -> None:
    short = muster("ps", "-n", "1", "-o", "name")
    assert short.stdout in {f"{job}\n", f"{other}\n"}
    count, limit = re.findall(r"\d+", short.stderr)
    assert short.stderr.endswith(
        f"{count} older job{'s' * (count != '1')} not shown (--limit {limit})\n"
    )
    assert int(limit) == int(count) + 1


@pytest.mark.parametrize("words", [("ps",), ("show", "a"), ("stop", "a"), ("submit", "--", "true")])
def test_url_with_a_wrong_path_is_refused(
    muster: Muster, service: Service, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("/api", "/jobs", "/api/v1/jobs/"):
        monkeypatch.setenv("MUSTER_URL", f"{service.url}{path}")
        refused = muster(*words)
        assert refused.exit_code == ExitCode.UNREACHABLE
        assert f"set MUSTER_URL to {service.url}\n" in refused.stderr
    monkeypatch.setenv("MUSTER_URL", f"{service.url}/api/v1/")
    assert muster("ps").exit_code == 0


@pytest.mark.parametrize(
    ("command", "path"),
    [
        (["ps"], "/jobs/summaries?limit=20"),
        (["show", "JOB"], "/jobs/JOB"),
        (["events", "JOB"], "/jobs/JOB/events"),
        (["workers", "JOB"], "/jobs/JOB/workers"),
        (["audit", "JOB"], "/jobs/JOB/audit?limit=10"),
        (["attempts", "JOB"], "/jobs/JOB/attempts?limit=20"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_json_and_yaml_are_the_body_of_the_api(
    muster: Muster, client: httpx.Client, elastic: str, command: list[str], path: str
) -> None:
    words = [elastic if word == "JOB" else word for word in command]
    answered = client.get(path.replace("JOB", elastic)).json()
    for output, read in (("json", json.loads), ("yaml", YAML(typ="safe", pure=True).load)):
        assert read(muster(*words, "-o", output).stdout) == answered


def test_leaderboard_names_the_best_job_of_a_sweep(
    muster: Muster, client: httpx.Client, stand_in: StandIn, name: str
) -> None:
    missing = muster("leaderboard")
    assert missing.exit_code == ExitCode.NOT_FOUND
    assert "muster submit --label sweep=lr" in missing.stderr
    jobs = {f"{name}-{rate}": rate for rate in (1, 2)}
    for job, rate in jobs.items():
        words = ("submit", "-d", "--id", job, "--label", f"sweep={name}", "--", "true", "--lr")
        assert muster(*words, f"{rate}").exit_code == 0
        stand_in.run(job, worker(0, step=7, total_steps=10, loss=0.5 / rate))
    lines = muster("leaderboard").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["place", "job", "status", "training", "loss", "step", "--lr"],
        ["1", f"{name}-2", "RUNNING", "0.25", "7/10", "2"],
        ["2", f"{name}-1", "RUNNING", "0.5", "7/10", "1"],
        ["best:", f"{name}-2", "(training", "loss", "0.25)"],
    ]
    body = client.get("/leaderboard", params={"sweep": name}).json()
    assert json.loads(muster("leaderboard", name, "-o", "json").stdout) == body
    client.post("/jobs", json={"job_id": name, "labels": {"sweep": "a"}}).raise_for_status()
    several = muster("leaderboard")
    assert several.exit_code == ExitCode.NOT_FOUND
    assert several.stderr.endswith(f"(muster leaderboard NAME): a, {name}\n")
    for job in (name, *jobs):
        stand_in.end(job)
        client.delete(f"/jobs/{job}").raise_for_status()


def test_show_lists_ranks(muster: Muster, stand_in: StandIn, job: str) -> None:
    stand_in.run(job, worker(0, step=7, total_steps=10), worker(1, step=5, total_steps=10))
    lines = muster("show", job).stdout.splitlines()
    assert lines[0].split() == ["job", job]
    assert ["step", "12/20"] in [line.split() for line in lines]
    assert ["runs", "the", "classifier"] in [line.split() for line in lines]
    ranks = lines[lines.index("") + 1 :]
    assert [rank.split()[0] for rank in ranks] == ["rank", "0", "1"]
    assert [rank.split()[2] for rank in ranks] == ["step", "7/10", "5/10"]


@pytest.mark.parametrize(
    ("ratio", "words"), [(0.2532, "sends 0.25 of the bytes"), (1.0, "saves nothing")]
)
def test_show_says_what_compression_saves(
    muster: Muster, stand_in: StandIn, job: str, ratio: float, words: str
) -> None:
    stand_in.run(job, worker(0, metrics={"compression.ratio": ratio}), worker(1))
    lines = muster("show", job).stdout.splitlines()
    assert f"compression of the script, {words}".split() in [line.split() for line in lines]


def test_show_ends_with_the_last_warning(muster: Muster, stand_in: StandIn, job: str) -> None:
    stand_in.run(job)
    said = [("warned", "older"), ("warned", "spends \x1b half"), ("rank_spawned", "rank 0 runs")]
    events = [Event(at=utc_now(), kind=kind, message=message) for kind, message in said]
    stand_in.write(job, events=events)
    shown = muster("show", job).stdout
    assert [line.split() for line in shown.splitlines() if line.startswith("warning")] == [
        ["warning", "spends", r"\x1b", "half"]
    ]


def test_show_says_what_runs_and_where(
    muster: Muster, client: httpx.Client, stand_in: StandIn, name: str
) -> None:
    command = ["python", "-c", "import os\nprint(os.getcwd())  # " + "x" * 99]
    asked = {"job_id": name, "command": command, "restart_scope": "gang", "world_size": 2}
    spec = client.post("/jobs", json=asked).raise_for_status().json()["spec"]
    ranks = worker(0, checkpoints_saved=57, last_checkpoint_step=282), worker(1, restarts=2)
    stand_in.run(name, *ranks)
    shown = muster("show", name).stdout.splitlines()
    facts = dict(line.split("  ", 1) for line in shown[: shown.index("")])
    facts = {name: text.strip() for name, text in facts.items()}
    assert facts["runs"].startswith("python -c 'import os print(os.getcwd())")
    assert len(facts["runs"]) == RUNS_WIDTH
    assert facts["working in"] == spec["working_dir"]
    assert facts["checkpoint in"].startswith(f"{spec['checkpoint_dir']}/")
    assert facts["restarts"] == "2, of all ranks together"
    assert [row.split()[-2] for row in shown[-3:]] == ["restarts", "2", "2"]
    assert facts["saved"] == "57 checkpoints, newest at step 282"
    stand_in.end(name)


def test_logs_have_ranks_and_are_followed_to_the_end(
    muster: Muster, stand_in: StandIn, agent: Agent, job: str
) -> None:
    stand_in.run(job, worker(0), worker(1))
    agent.write(job, 0, "a\nb\n", at_micros=1_000_000)
    agent.write(job, 1, "c\n", at_micros=2_000_000)
    assert muster("logs", job).stdout == "[rank 0] a\n[rank 0] b\n[rank 1] c\n"
    assert muster("logs", job, "--rank", "0", "--tail", "1").stdout == "b\n"
    objects = map(json.loads, muster("logs", job, "-o", "json").stdout.splitlines())
    assert [(one["rank"], one["line"]) for one in objects] == [(0, "a"), (0, "b"), (1, "c")]
    stand_in.move(job, JobStatus.COMPLETED)
    assert muster("logs", "-f", job).stdout == "[rank 0] a\n[rank 0] b\n[rank 1] c\n"


def test_logs_are_selected_by_text_and_time(
    muster: Muster, stand_in: StandIn, agent: Agent, job: str
) -> None:
    stand_in.run(job, worker(0), worker(1))
    agent.write(job, 0, "loss 1\nstep 1\n", at_micros=1_000_000)
    agent.write(job, 0, "loss 2\n", at_micros=2_000_000_000_000_000)
    assert muster("logs", job, "--grep", "loss", "--rank", "0").stdout == "loss 1\nloss 2\n"
    assert muster("logs", job, "--since", "2001-01-01").stdout == "[rank 0] loss 2\n"
    stand_in.move(job, JobStatus.COMPLETED)
    followed = muster("logs", job, "-f", "--grep", "loss")
    assert followed.stdout == "[rank 0] loss 1\n[rank 0] loss 2\n"


def test_events_are_followed_to_the_end(muster: Muster, stand_in: StandIn, job: str) -> None:
    stand_in.end(job)
    told = muster("events", job).stdout
    assert "the job was submitted" in told.splitlines()[0]
    assert muster("events", "-f", job).stdout == told


@pytest.mark.parametrize(
    ("status", "code"),
    [(JobStatus.COMPLETED, ExitCode.OK), (JobStatus.FAILED, ExitCode.FAILED)],
)
def test_wait_exits_with_the_code_of_the_job(
    muster: Muster, stand_in: StandIn, job: str, status: JobStatus, code: ExitCode
) -> None:
    stand_in.run(job)
    assert muster("wait", job, "--until", "running").exit_code == ExitCode.OK
    stand_in.move(job, status)
    result = muster("wait", job)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.splitlines()[-1].startswith(f"{job} is {status}")
    assert muster("wait", job, "--until", status).exit_code == ExitCode.OK


def test_stored_control_characters_are_escaped(muster: Muster, stand_in: StandIn, job: str) -> None:
    said = "lost\x1b]0;done\x07\x1b[2J\x9b1m"
    stand_in.run(job)
    stand_in.write(job, events=[Event(at=utc_now(), kind="lost", message=said)])
    stand_in.move(job, JobStatus.FAILED, message=said)
    for words in (["show"], ["events"], ["events", "-f"], ["attempts"], ["wait"]):
        told = muster(*words, job).output
        assert r"lost\x1b]0;done\x07\x1b[2J\x9b1m" in told
        assert all(line.isprintable() for line in told.splitlines() if "lost" in line)


def test_rm_deletes_only_ended_jobs(
    muster: Muster, stand_in: StandIn, job: str, other: str
) -> None:
    refused = muster("rm", job)
    assert (refused.exit_code, refused.stdout) == (ExitCode.CONFLICT, "")
    assert "is not over: stop it first" in refused.stderr
    assert stand_in.jobs.find(JobId(job))
    stand_in.run(job, worker(0, checkpoints_saved=1))
    for one in (job, other):
        stand_in.end(one)
    assert muster("stop", job).stdout == f"{job} is already STOPPED\n"
    removed = muster("rm", job)
    assert removed.stdout == f"{job} is deleted\n"
    assert removed.stderr.startswith("its checkpoints stay in ")
    assert removed.stderr.endswith(f"/checkpoints/{job}\n")
    kept = muster("rm", "--keep-logs", other)
    assert kept.stdout == f"{other} is deleted\n"
    assert kept.stderr.startswith(f"its logs: jobs/{other}.")
    assert "its checkpoints" not in kept.stderr, "it saved none"
    assert not stand_in.jobs.find(JobId(job))


def test_stop_and_rm_refuse_a_prefix(muster: Muster, stand_in: StandIn, job: str) -> None:
    stand_in.end(job)
    hint = f"if {job} is meant, say all of it"
    for verb in ("stop", "rm"):
        assert hint in muster(verb, job[:-1]).stderr
    assert hint in muster("chaos", job[:-1]).stderr
    assert stand_in.jobs.find(JobId(job))


def test_refused_job_does_not_keep_the_others(
    muster: Muster, stand_in: StandIn, job: str, other: str
) -> None:
    stopped = muster("stop", "nope", job)
    assert (stopped.exit_code, stopped.stdout) == (ExitCode.NOT_FOUND, f"{job} is stopping\n")
    assert stopped.stderr.startswith("muster: there is no job 'nope'")
    stand_in.end(job)
    removed = muster("rm", other, "nope", job)
    assert (removed.exit_code, removed.stdout) == (ExitCode.CONFLICT, f"{job} is deleted\n")
    first, second = removed.stderr.splitlines()
    assert first.startswith(f"muster: {other} is not over")
    assert second.startswith("muster: there is no job 'nope'")
    assert stand_in.jobs.find(JobId(other))


def test_rm_stop_says_how_long_it_may_take(
    muster: Muster, stand_in: StandIn, job: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        cli.jobs.lifecycle, "notice_if_slow", lambda it: nullcontext(said.append(it))
    )
    stand_in.end(job)
    assert muster("rm", "--stop", job).exit_code == 0
    assert muster("rm", other).exit_code == ExitCode.CONFLICT
    assert said == []
    with ThreadPoolExecutor() as aside:
        ended = aside.submit(_end_once_asked, stand_in, other)
        assert muster("rm", "--stop", other).exit_code == 0
        ended.result()
    assert said == [f"{other} saves and stops first; it is killed after 30 s"]


def test_purge_says_what_it_waits_for(
    muster: Muster, stand_in: StandIn, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        cli.jobs.lifecycle, "notice_if_slow", lambda it: nullcontext(said.append(it))
    )
    with ThreadPoolExecutor() as aside:
        ended = aside.submit(_end_once_asked, stand_in, job)
        assert muster("purge", "--status", "QUEUED", "--stop", "--yes").exit_code == 0
        ended.result()
    assert muster("purge", "--status", "QUEUED", "--yes").exit_code == 0
    assert said == [
        "running jobs save and stop first, and are killed after their grace period",
        "deleting the jobs",
    ]
    assert not stand_in.jobs.find(JobId(job))


def _end_once_asked(stand_in: StandIn, job: str) -> None:
    await_value(
        lambda: stand_in.jobs.get(JobId(job)).stop_request, lambda: f"no stop request for {job}"
    )
    stand_in.end(job)


def test_purge_without_a_terminal_needs_yes(
    muster: Muster, stand_in: StandIn, job: str, other: str
) -> None:
    stand_in.end(job)
    refused = muster("purge", "--status", "STOPPED")
    assert refused.exit_code == ExitCode.USAGE
    assert "add --yes" in refused.stderr
    assert stand_in.jobs.find(JobId(job))
    purged = muster("purge", "--status", "STOPPED", "--yes")
    assert job in purged.stdout.splitlines()
    assert stand_in.jobs.find(JobId(other))


def test_purge_reports_what_it_could_not_delete(
    muster: Muster, service: Service, stand_in: StandIn, job: str
) -> None:
    stand_in.end(job)
    root = service.files.job(job).root
    root.mkdir(parents=True, exist_ok=True)
    uid = stand_in.jobs.get(JobId(job)).uid
    obstacle = root.with_name(f"{job}.{uid}") / "in-the-way"
    obstacle.parent.mkdir()
    obstacle.touch()
    purged = muster("purge", "--status", "STOPPED", "--yes")
    assert purged.exit_code == ExitCode.FAILED
    assert f"{job} was not deleted: {root} could not be removed" in purged.stderr
    assert "not over" not in purged.stderr
    obstacle.unlink()
    assert muster("purge", "--status", "STOPPED", "--yes").exit_code == 0


def test_purge_dry_run_deletes_nothing(muster: Muster, stand_in: StandIn, job: str) -> None:
    stand_in.end(job)
    result = muster("purge", "--dry-run")
    assert (result.exit_code, job in result.stdout.splitlines()) == (0, True)
    assert "would be deleted" in result.stderr
    assert muster("show", job).exit_code == 0


def test_stop_records_its_reason_and_actor(muster: Muster, stand_in: StandIn, job: str) -> None:
    stand_in.run(job)
    assert muster("stop", job, "--reason", "the loss diverges").exit_code == 0
    [event] = [
        event
        for event in json.loads(muster("events", job, "-o", "json").stdout)["events"]
        if "the loss diverges" in event["message"]
    ]
    assert event["actor"]
