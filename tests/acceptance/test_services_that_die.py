"""API, coordinator and agent are killed while jobs run: nothing is lost, the bits are the same."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree

import httpx
import pytest

from muster.contracts.messages.agent import RankExited
from muster.contracts.messages.wire import ExitRecord
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.host.containment import tagged_processes
from muster.host.processes import is_running as is_alive
from muster.host.processes import send_signal
from muster.runtime.exit_report import write_exit_record
from tests.support.installation import (
    Installation,
    Service,
    Undisturbed,
    await_end,
    await_value,
    has_saved,
    is_over,
    is_running,
    locked,
    pids,
    records,
)
from tests.support.marks import long

LONG = {"world_size": 2, "epochs": 3, "sleep_sec": 0.12}
"""Two ranks of 48 steps and more than five seconds: time to be interrupted."""

CHECKPOINTS = 2 * 10
"""Of both ranks: after every five steps, and after the last one."""


@pytest.mark.parametrize("victims", [long(["coordinator"]), ["agent"], ["coordinator", "agent"]])
def test_killing_services_repeatedly_disturbs_no_rank(
    installation: Installation, undisturbed: Undisturbed, victims: list[str]
) -> None:
    job_id = installation.submit(**LONG)
    for saved in (1, 4):
        await_value(partial(has_saved_or_ended, installation, job_id, saved), str)
        agents = tagged_processes(f"{installation.uids[job_id]}/agent")
        if "coordinator" in victims:
            installation.coordinator.end(signal.SIGKILL)
        for agent in agents if "agent" in victims else ():
            send_signal(agent, signal.SIGKILL)
        if "coordinator" in victims:
            installation.coordinator.start()
    seen = installation.complete(job_id)
    assert (seen["restarts"], started(installation, job_id)) == (0, 2)
    assert seen["checkpoints_saved"] == CHECKPOINTS
    if victims != ["coordinator", "agent"]:  # the successor may not have known the agent
        assert ("agent_lost" in installation.kinds(job_id)) == (victims == ["agent"])
    assert installation.kinds(job_id)[-1] == "job_completed"
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_a_rank_killed_without_a_coordinator_is_replaced(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = installation.submit(**LONG)
    first, _ = records(installation.wait_until(job_id, has_saved))
    installation.coordinator.end(signal.SIGKILL)
    send_signal(first, signal.SIGKILL)
    await_end([first])
    installation.coordinator.start()
    assert installation.complete(job_id)["restarts"] == 1
    assert started(installation, job_id) == 3
    assert "rank_exited" in installation.kinds(job_id)
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_a_coordinator_that_is_terminated_hands_over(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = installation.submit(**LONG)
    installation.wait_until(job_id, has_saved)
    assert installation.coordinator.end(signal.SIGTERM) == 0
    # The ranks go on without it.
    assert installation.running_processes()
    installation.coordinator.start()
    installation.complete(job_id)
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_interrupted_coordinator_returns_its_jobs_to_the_queue(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = installation.submit(**LONG)
    installation.wait_until(job_id, has_saved)
    assert installation.coordinator.end(signal.SIGINT) == 0
    assert not installation.running_processes()
    seen = installation.see(job_id)
    assert (seen["status"], seen["reason"]) == ("QUEUED", "interrupted")
    saved = [checkpoint.step for checkpoint in installation.checkpoints(job_id, 2)]
    assert saved == [worker["step"] for worker in seen["workers"]]
    installation.coordinator.start()
    assert installation.complete(job_id)["restarts"] == 0
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_a_killed_api_loses_nothing(installation: Installation, undisturbed: Undisturbed) -> None:
    job_id = installation.submit(**LONG)
    before = installation.wait_until(job_id, has_saved)
    with streamed(installation, job_id) as lines:
        next(line for line in lines if line.startswith("data:"))
        installation.api.end(signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    installation.start_api()
    # A rank that has not finished still has its process.
    now = zip(pids(installation.see(job_id)), pids(before), strict=True)
    assert all(pid in {None, was} for pid, was in now)
    assert installation.complete(job_id)["restarts"] == 0
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_a_command_without_messages_is_adopted_and_ended(
    installation: Installation,
) -> None:
    """It has no environment and no way to its agent: its process is on record, and that is all."""
    job_id = installation.submit(
        world_size=1, command=["/usr/bin/env", "-i", "/bin/sh", "-c", "sleep 7773; exit 1"]
    )
    before = records(installation.wait_until(job_id, is_running))
    (agent,) = tagged_processes(f"{installation.uids[job_id]}/agent")
    installation.coordinator.end(signal.SIGKILL)
    send_signal(agent, signal.SIGKILL)
    installation.coordinator.start()
    await_value(lambda: tagged_processes(f"{installation.uids[job_id]}/agent"), str)
    assert records(installation.wait_until(job_id, is_running)) == before
    assert all(map(is_alive, before))
    installation.request("DELETE", f"/jobs/{job_id}?force=true")
    await_end(before)
    installation.forget(job_id)


def test_a_recorded_exit_counts_like_a_reported_one(
    installation: Installation, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    script = f"until [ -e {gate} ]; do sleep 0.02; done; echo bad arguments; exit 64"
    job_id = installation.submit(world_size=1, command=["sh", "-c", script])
    installation.wait_until(job_id, is_running)
    (agent,) = tagged_processes(f"{installation.uids[job_id]}/agent")
    installation.coordinator.end(signal.SIGKILL)
    gate.touch()
    await_value(installation.files.job(job_id).exit_record(0, 0).exists, str)
    send_signal(agent, signal.SIGKILL)
    installation.coordinator.start()
    job = installation.fail(job_id)
    assert (job["reason"], job["exit_code"]) == ("do_not_retry", 64)
    assert "bad arguments" in job["message"]
    (end,) = installation.request("GET", f"/jobs/{job_id}/attempts").json()["attempts"]
    assert (end["retry_class"], end["exit_code"]) == ("do_not_retry", 64)


def test_an_exit_is_recorded_before_an_agent_dies(
    installation: Installation, tmp_path: Path
) -> None:
    """The coordinator lives and finds the record: what is done is not run once more."""
    gate = tmp_path / "gate"
    script = f"until [ -e {gate} ]; do sleep 0.02; done"
    job_id = installation.submit(world_size=1, command=["sh", "-c", script])
    (process,) = records(installation.wait_until(job_id, is_running))
    (agent,) = tagged_processes(f"{installation.uids[job_id]}/agent")
    send_signal(agent, signal.SIGSTOP)  # it does what it would do next by our hand
    gate.touch()
    await_end([process])
    end = RankExited(rank=0, attempt=0, exit_code=0, signal=None, last_lines=())
    record = ExitRecord(pid=process.pid, at="", said=(), exited=end)
    write_exit_record(installation.files.job(job_id), record)
    send_signal(agent, signal.SIGKILL)
    assert installation.complete(job_id)["restarts"] == 0
    assert started(installation, job_id) == 1
    (end,) = installation.request("GET", f"/jobs/{job_id}/attempts").json()["attempts"]
    assert end["retry_class"] == "finished"


def test_ranks_without_data_end_after_the_takeover(
    installation: Installation, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "shards", synthetic(samples=40_000, shards=4))
    job_id = installation.submit(**LONG, dataset_dir=str(tmp_path / "shards"))
    ranks = records(installation.wait_until(job_id, has_saved))
    (agent,) = tagged_processes(f"{installation.uids[job_id]}/agent")
    installation.coordinator.end(signal.SIGKILL)
    send_signal(agent, signal.SIGKILL)
    rmtree(tmp_path / "shards")
    installation.coordinator.start()
    job = installation.fail(job_id)
    assert job["reason"] == "invalid_dataset"
    assert str(tmp_path / "shards") in job["message"]
    await_end(ranks)
    ends = installation.request("GET", f"/jobs/{job_id}/attempts").json()["attempts"]
    assert len(ends) == 2
    assert [(end["retry_class"], end["reason"]) for end in ends] == 2 * [
        ("stopped", "invalid_dataset")
    ]


def test_a_stopped_coordinator_that_wakes_up_is_fenced(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = installation.submit(**LONG)
    installation.wait_until(job_id, has_saved)
    first = installation.coordinator
    assert first.process is not None
    first.process.send_signal(signal.SIGSTOP)
    installation.coordinator = Service("coordinator", installation.root, installation.environment)
    installation.coordinator.start()
    # Its lease has to run out: it is not provably dead.
    installation.wait_until(job_id, is_over)
    assert first.end(signal.SIGCONT) == 75
    assert installation.complete(job_id)["restarts"] == 0
    assert started(installation, job_id) == 2
    assert "agent_lost" not in installation.kinds(job_id)
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_job_that_ends_while_the_database_is_locked_is_kept(
    installation: Installation, undisturbed: Undisturbed
) -> None:
    job_id = installation.submit(**LONG)
    ranks = records(installation.wait_until(job_id, has_saved))
    with locked(installation):
        await_end(ranks)
    assert installation.complete(job_id)["restarts"] == 0
    assert installation.digests(job_id, 2) == undisturbed(**LONG)


def test_a_foreign_file_at_the_path_of_a_socket_costs_no_job(installation: Installation) -> None:
    job_id = installation.submit(**LONG, max_restarts=0)
    files = installation.files.job(job_id)
    installation.wait_until(job_id, has_saved)
    foreign = files.agent_socket(9999)
    foreign.touch()
    installation.complete(job_id)
    assert f"socket {foreign.name}" in files.agent_log.read_text()
    assert not foreign.exists()
    assert files.agent_socket(10_000).exists()


@contextmanager
def streamed(installation: Installation, job_id: str) -> Iterator[Iterator[str]]:
    """Open a stream of logs and give its lines."""
    port = installation.environment["MUSTER_PORT"]
    url = f"http://127.0.0.1:{port}/jobs/{job_id}/logs/stream"
    with httpx.stream("GET", url, timeout=60.0) as answer:
        yield answer.iter_lines()


def started(installation: Installation, job_id: str) -> int:
    """Return how many ranks were ever started."""
    return installation.kinds(job_id).count("rank_started")


def has_saved_or_ended(installation: Installation, job_id: str, checkpoints: int) -> bool:
    seen = installation.see(job_id)
    return seen["checkpoints_saved"] >= checkpoints or is_over(seen)
