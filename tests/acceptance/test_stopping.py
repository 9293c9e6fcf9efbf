"""Stopping a job: work is saved, no process is left, and the job can be resumed."""

import secrets
import shutil
import signal
import sys
from pathlib import Path

import pytest

from muster.checkpoints.manifest import LATEST, MANIFEST, STATE
from muster.contracts.settings.paths import checkpoints_of_rank
from muster.host.containment import tagged_processes
from muster.host.processes import send_signal
from tests.support.installation import Installation, Undisturbed, await_value, is_over, is_running

LONG = {"world_size": 2, "epochs": 3, "sleep_sec": 0.12}
"""Two ranks of 48 steps and more than five seconds: time to be interrupted."""

SAVING = """
import os, signal, sys, time
from pathlib import Path

def save(*_):
    Path("saving").touch()
    while not Path("go").exists():
        time.sleep(0.01)
    Path("saved").write_text("all of it")
    sys.exit()

if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, save)
    Path("ready").touch()
    time.sleep(600)
while not Path("ready").exists():
    time.sleep(0.01)
sys.exit(3)
"""

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])                                 # in its group
subprocess.Popen(["sleep", "601"], start_new_session=True)         # out of its session
if os.fork() == 0:                                                 # a daemon as of old
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        time.sleep(602)
    os._exit(0)
print("ready", flush=True)
time.sleep(603)
"""


def test_a_stopped_job_has_saved_its_last_step(installation: Installation) -> None:
    job_id = installation.submit(**LONG, checkpoint_every=1000)
    installation.wait_until(job_id, lambda now: now["step"] > 3)
    installation.stop(job_id)
    seen = installation.wait_until(job_id, is_over)
    assert (seen["status"], seen["reason"]) == ("STOPPED", "stopped_by_user")
    assert seen["message"] == "stopped on request; its checkpoints are kept"
    assert not installation.running_ranks()
    saved = [checkpoint.step for checkpoint in installation.checkpoints(job_id, 2)]
    assert saved == [worker["step"] for worker in seen["workers"]]
    assert all(0 < step < 48 for step in saved)


@pytest.mark.parametrize("scope", ["rank", "gang"])
def test_remaining_ranks_save_when_a_job_fails(
    installation: Installation, tmp_path: Path, scope: str
) -> None:
    job_id = _saving_when_it_fails(installation, tmp_path, restart_scope=scope)
    (tmp_path / "go").touch()
    seen = installation.wait_until(job_id, is_over)
    assert (seen["status"], seen["reason"]) == ("FAILED", "restart_limit")
    assert (tmp_path / "saved").read_text() == "all of it"
    told = [event["message"] for event in installation.events(job_id)]
    assert "the job cannot go on; ranks that still run save and exit" in told
    assert [line for line in told if line.startswith("rank 0")][1:] == ["rank 0 exited with code 0"]


@pytest.mark.parametrize("who", ["agent", "agent and coordinator"])
def test_ranks_that_save_after_a_failure_survive_a_kill_of(
    installation: Installation, tmp_path: Path, who: str
) -> None:
    job_id = _saving_when_it_fails(installation, tmp_path)
    own = f"{installation.uids[job_id]}/agent"
    (agent,) = tagged_processes(own)
    if "coordinator" in who:
        installation.coordinator.end(signal.SIGKILL)
    send_signal(agent, signal.SIGKILL)
    if "coordinator" in who:
        installation.coordinator.start()
    await_value(lambda: agent not in (found := tagged_processes(own)) and found, str)
    (tmp_path / "go").touch()
    seen = installation.wait_until(job_id, is_over)
    assert (seen["status"], seen["reason"]) == ("FAILED", "restart_limit")
    assert (tmp_path / "saved").read_text() == "all of it"
    assert installation.kinds(job_id)[-1] == "job_failed"
    assert seen["restarts"] == 0


def _saving_when_it_fails(installation: Installation, directory: Path, **fields: str) -> str:
    """Return a job that has failed for good, whose rank 0 saves until it is let go."""
    script = directory / "saving.py"
    script.write_text(SAVING)
    job_id = installation.submit(
        world_size=2,
        command=[sys.executable, str(script)],
        working_dir=str(directory),
        max_restarts=0,
        **fields,
    )
    await_value((directory / "saving").exists, lambda: installation.log(job_id))
    return job_id


def test_rank_and_its_children_are_killed_after_the_grace_period(
    installation: Installation, tmp_path: Path
) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    job_id = installation.submit(
        world_size=1, command=[sys.executable, str(script)], stop_grace_seconds=1
    )
    installation.wait_until(job_id, lambda _: "ready" in installation.log(job_id))
    # The program, two children and the daemon; one being executed shows no tag for a moment.
    installation.wait_until(job_id, lambda _: len(installation.running_ranks()) >= 4)
    installation.stop(job_id)
    installation.wait_until(job_id, is_over)
    assert not installation.running_ranks()
    told = [event["message"] for event in installation.events(job_id)]
    assert "rank 0 did not end within the grace period and was killed" in told


def test_leftovers_of_a_rank_end_before_its_successor_starts(
    installation: Installation, tmp_path: Path
) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    left = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    open('left.pid', 'w').write(str(left.pid))\n"
        "    os.abort()\n"
        "pid = open('left.pid').read()\n"
        "print('left over' if os.path.exists(f'/proc/{pid}') else 'alone')\n"
    )
    command = [sys.executable, str(script)]
    job_id = installation.submit(world_size=1, command=command, working_dir=str(tmp_path))
    assert installation.complete(job_id)["restarts"] == 1
    assert installation.log(job_id) == "alone\n"


def test_deleting_by_force_ends_everything(installation: Installation) -> None:
    job_id = installation.submit(world_size=2, command=["sleep", "600"])
    installation.wait_until(job_id, is_running)
    refused = installation.request("DELETE", f"/jobs/{job_id}")
    assert refused.status_code == 409
    answer = installation.request("DELETE", f"/jobs/{job_id}", params={"force": True})
    assert answer.is_success, answer.text
    assert installation.request("GET", f"/jobs/{job_id}").status_code == 404
    installation.forget(job_id)
    assert not installation.running_ranks()


def test_a_stopped_job_goes_on_from_exactly_there(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = stopped_job(installation)
    steps = [checkpoint.step for checkpoint in installation.checkpoints(job_id, 2)]
    assert installation.request("DELETE", f"/jobs/{job_id}").is_success
    refused = installation.request("POST", "/jobs", json={**LONG, "job_id": job_id})
    assert refused.status_code == 409
    assert "resume_from" in refused.json()["detail"]
    installation.submit(**LONG, job_id=job_id, resume_from=job_id)
    installation.complete(job_id)
    for rank, step in enumerate(steps):
        assert f"goes on from its checkpoint of step {step}\n" in installation.log(job_id, rank)
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


@pytest.fixture(scope="module")
def stopped(_shared: Installation) -> str:
    """One job that was stopped in the middle, for many tests."""
    return stopped_job(_shared)


@pytest.fixture
def source(installation: Installation, stopped: str) -> str:
    """Checkpoints of a stopped job that a test may damage."""
    source = f"source-{secrets.token_hex(4)}"
    shutil.copytree(installation.checkpoint_dir / stopped, installation.checkpoint_dir / source)
    return source


def test_a_job_can_start_from_another_ones_checkpoints(
    installation: Installation, source: str, undisturbed: Undisturbed
) -> None:
    before = installation.digests(source, 2)
    job_id = installation.submit(**LONG, resume_from=source)
    installation.complete(job_id)
    assert "goes on from its checkpoint of step" in installation.log(job_id)
    assert installation.digests(job_id, 2) == undisturbed(**LONG)
    assert installation.digests(source, 2) == before


def test_damaged_newest_checkpoint_is_skipped_with_a_warning(
    installation: Installation, source: str, undisturbed: Undisturbed
) -> None:
    directory = checkpoints_of_rank(installation.checkpoint_dir, source, 1)
    latest = directory / (directory / LATEST).read_text().strip()
    state = bytearray((latest / STATE).read_bytes())
    state[len(state) // 2] ^= 1
    (latest / STATE).write_bytes(state)
    job_id = installation.submit(**LONG, resume_from=source)
    installation.complete(job_id)
    warned = [event for event in installation.events(job_id) if event["kind"] == "warned"]
    assert warned
    assert {event["rank"] for event in warned} == {1}
    assert any(latest.name in event["message"] for event in warned)
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_resume_without_an_intact_checkpoint_fails(installation: Installation, source: str) -> None:
    directory = checkpoints_of_rank(installation.checkpoint_dir, source, 0)
    for manifest in directory.glob(f"step_*/{MANIFEST}"):
        manifest.write_bytes(b"")
    job = installation.fail(installation.submit(**LONG, resume_from=source))
    assert job["reason"] == "invalid_checkpoint"
    assert f"no checkpoint in {directory} is intact" in job["message"]


def test_checkpoints_of_another_world_size_are_refused(
    installation: Installation, source: str
) -> None:
    job = installation.fail(installation.submit(world_size=1, resume_from=source))
    assert job["reason"] == "invalid_checkpoint"
    assert "use the world size it was saved with" in job["message"]


def stopped_job(installation: Installation) -> str:
    """Return the id of a job that was stopped in the middle, with several checkpoints."""
    job_id = installation.submit(**LONG)
    installation.wait_until(job_id, lambda now: all(w["step"] > 10 for w in now["workers"]))
    installation.stop(job_id)
    installation.wait_until(job_id, is_over)
    return job_id
