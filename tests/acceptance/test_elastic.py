"""Ranks join, die and leave while one model trains; its bits stay the same."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from muster.host.containment import tagged_processes
from muster.host.processes import identify, send_signal
from stress.elastic_schedules import LONG, Schedule
from tests.support.installation import Installation, pids
from tests.support.marks import long
from tests.support.pools import PooledJob


@pytest.fixture(scope="session")
def undisturbed(_shared: Installation) -> str:
    """The digest of one undisturbed rank."""
    return PooledJob(_shared, world_size=1).completes()


@pytest.mark.parametrize("backend", ["shared_memory", "tcp"])
def test_a_killed_rank_changes_no_bit_and_no_other_rank(
    installation: Installation, undisturbed: str, backend: str
) -> None:
    job = PooledJob(installation, world_size=4, backend=backend)
    before = job.trains_with(0, 1, 2, 3)
    job.wait_for_steps()
    job.signals(1)
    after = job.trains_with(0, 2, 3, 4)
    assert all(after[survivor] == before[survivor] for survivor in (0, 2, 3))
    assert job.completes() == undisturbed
    assert {worker["rank"] for worker in job.workers() if worker["worker_id"] == "4"} == {1}
    assert job.states() == {0: "left", 1: "failed", 2: "left", 3: "left", 4: "left"}


def test_a_job_grows_loses_a_rank_and_shrinks(installation: Installation, undisturbed: str) -> None:
    job = PooledJob(installation, world_size=2, max_workers=4)
    first = job.trains_with(0, 1)
    job.scales(4)
    job.trains_with(0, 1, 2, 3)
    job.signals(2)
    job.trains_with(0, 1, 3, 4)
    job.scales(3)
    last = job.trains_with(0, 1, 4)  # the highest rank went
    assert {worker: last[worker] for worker in first} == first
    assert job.completes() == undisturbed


def test_a_pause_holds_the_step(installation: Installation, undisturbed: str) -> None:
    job = PooledJob(installation, world_size=2)
    before = job.trains_with(0, 1)
    job.wait_for_steps()
    job.pauses()
    seen = job.wait_for_status("PAUSED")
    assert seen["reason"] == "paused_by_user"
    job.hurries()
    step = max(worker["step"] for worker in job.see()["workers"])
    job.signals(1)
    job.wait_until(lambda: set(job.active()) == {0, 2})
    job.wait_for_status("PAUSED")
    assert job.see()["step"] == step, "not even for a newcomer"
    assert job.active()[0] == before[0]
    job.resumes()
    assert job.completes() == undisturbed


@pytest.mark.parametrize("who", ["saver", "coordinator"])
def test_a_requested_checkpoint_is_durable_though_one_dies(
    installation: Installation, undisturbed: str, who: str
) -> None:
    job = PooledJob(installation, pace_seconds=0.05, world_size=3, checkpoint_every=1000)
    job.trains_with(0, 1, 2)
    step = job.wait_for_steps()
    command = [sys.executable, "-P", "-m", "cli", "checkpoint", "now", job.job_id]
    environment = {**installation.environment, "MUSTER_URL": installation.url}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as asked:
        installation.wait_until(job.job_id, lambda _: "checkpoint_requested" in job.kinds())
        job.signals(0) if who == "saver" else installation.restart_coordinator()
        printed, _ = asked.communicate(timeout=60)
    assert asked.returncode == 0
    saved = int(re.search(r"checkpoint of step (\d+) is durable", printed)[1])
    assert saved >= step
    assert saved in [one["step"] for one in job.audit()["checkpoints"]]
    assert job.kinds().count("checkpoint_saved") == 1
    assert job.completes() == undisturbed


def test_a_named_worker_leaves(installation: Installation, undisturbed: str) -> None:
    job = PooledJob(installation, world_size=3)
    before = job.trains_with(0, 1, 2)
    job.lets_go(1)
    assert job.trains_with(0, 2) == {0: before[0], 2: before[2]}
    job.wait_until(lambda: job.states()[1] == "left")
    assert job.completes() == undisturbed
    assert job.see()["restarts"] == 0


def test_killing_all_ranks_resumes_from_the_checkpoint(
    installation: Installation, undisturbed: str
) -> None:
    job = PooledJob(installation, world_size=2)
    job.trains_with(0, 1)
    job.wait_until(lambda: job.audit()["checkpoints"])
    for worker in job.active():
        job.signals(worker)
    job.trains_with(2, 3)
    assert job.completes() == undisturbed
    # The first member restores for all, whatever its rank is.
    logs = [installation.log(job.job_id, rank) for rank in range(2)]
    assert any("goes on from the checkpoint" in log for log in logs)


def test_the_end_of_the_coordinator_is_not_that_of_the_training(
    installation: Installation, undisturbed: str
) -> None:
    job = PooledJob(installation, world_size=3)
    before = job.trains_with(0, 1, 2)
    job.lets_go(1)
    job.wait_until(lambda: job.states()[1] == "left")
    for _ in range(2):
        job.wait_for_steps()
        installation.restart_coordinator()
    assert job.trains_with(0, 2) == {0: before[0], 2: before[2]}
    assert job.completes() == undisturbed
    assert job.see()["restarts"] == 0


def test_a_member_that_dies_without_a_coordinator_is_replaced(
    installation: Installation, undisturbed: str
) -> None:
    job = PooledJob(installation, world_size=3)
    before = job.trains_with(0, 1, 2)
    job.wait_for_steps()
    installation.coordinator.end(signal.SIGKILL)
    job.signals(1)
    installation.coordinator.start()
    after = job.trains_with(0, 2, 3)
    assert (after[0], after[2]) == (before[0], before[2])
    assert job.completes() == undisturbed


@pytest.mark.parametrize("backend", ["shared_memory", "tcp"])
def test_the_end_of_the_agent_is_not_that_of_the_training(
    installation: Installation, undisturbed: str, backend: str
) -> None:
    job = PooledJob(installation, world_size=2, max_workers=3, backend=backend)
    before = job.trains_with(0, 1)
    # A fork that becomes its prefork server has its tag for a moment: the agent is the older one.
    agents = tagged_processes(f"{installation.uids[job.job_id]}/agent")
    send_signal(min(agents, key=lambda it: it.start_ticks), signal.SIGKILL)
    job.wait_until(lambda: "agent_lost" in installation.kinds(job.job_id))
    job.wait_for_steps()
    job.scales(3)
    after = job.trains_with(0, 1, 2)
    assert (after[0], after[1]) == (before[0], before[1])
    assert job.completes() == undisturbed
    assert job.see()["restarts"] == 0


def test_a_rank_that_stands_still_is_replaced(installation: Installation, undisturbed: str) -> None:
    job = PooledJob(installation, world_size=3, heartbeat_timeout=1)
    before = job.trains_with(0, 1, 2)
    stopped = identify(job.signals(0, signal.SIGSTOP))
    assert stopped is not None
    after = job.trains_with(1, 2, 3)
    assert all(after[survivor] == before[survivor] for survivor in (1, 2))
    assert identify(stopped.pid) != stopped, "nothing is left that SIGCONT could wake"
    assert job.completes() == undisturbed
    told = [event["message"] for event in installation.events(job.job_id)]
    assert "rank 0 sent no heartbeat for 1 s and was killed" in told


def test_a_hanging_rank_is_replaced_and_waiting_ranks_are_not(
    installation: Installation, undisturbed: str
) -> None:
    job = PooledJob(
        installation, world_size=3, program="paced.py:Hanging", progress_timeout_seconds=1
    )
    before = job.trains_with(0, 1, 2)
    job.lets_one_hang()
    job.wait_until(lambda: 3 in job.active())
    after = job.active()
    survivors = before.keys() & after.keys()
    assert len(survivors) == 2, "one was to blame"
    assert all(after[survivor] == before[survivor] for survivor in survivors)
    assert job.completes() == undisturbed
    (culprit,) = before.keys() - survivors
    restarts = {worker["rank"]: worker["restarts"] for worker in job.see()["workers"]}
    assert restarts == {rank: int(rank == culprit) for rank in range(3)}
    told = [event["message"] for event in installation.events(job.job_id)]
    assert f"rank {culprit} sent heartbeats but took no step for 1 s and was killed" in told


def test_a_program_that_hangs_before_it_can_train_is_replaced(
    installation: Installation, undisturbed: str
) -> None:
    job = PooledJob(
        installation,
        world_size=2,
        program="paced.py:HangingAtFirst",
        progress_timeout_seconds=1,
        start_grace_seconds=3,
    )
    assert job.completes() == undisturbed
    told = [event["message"] for event in installation.events(job.job_id)]
    for rank in (0, 1):
        sentence = f"rank {rank} sent heartbeats but was not ready to train for 3 s and was killed"
        assert sentence in told


def test_a_stopped_job_can_be_gone_on_with(installation: Installation, undisturbed: str) -> None:
    job = PooledJob(installation, world_size=2)
    job.trains_with(0, 1)
    job.wait_for_steps()
    installation.stop(job.job_id)
    job.wait_for_status("STOPPED")
    assert set(job.states().values()) == {"left"}
    other = PooledJob(installation, world_size=3, resume_from=job.job_id)
    other.hurries()
    installation.complete(other.job_id)
    assert other.digest() == undisturbed


FAULTS = {
    "a NaN": "GRADIENT = np.full(8, np.nan, np.float32)",
    "its end in the middle": "sys.exit(0)",
}

FAULTY = """
import os
import sys
import numpy as np
from muster.program import Contribution

{fault}

class Faulty:
    def initial(self, seed):
        return {{"weights": np.zeros(8, np.float32)}}

    def gradient(self, state, batch, random):
        return Contribution({{"weights": GRADIENT}}, 0.0)

    def update(self, state, gradients, step):
        return state
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_program_that_cannot_work_fails_with_a_sentence(
    installation: Installation, tmp_path: Path, fault: str
) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY.format(fault=FAULTS[fault]))
    job_id = installation.submit(
        mode="synchronous", world_size=2, program="faulty.py:Faulty", working_dir=str(tmp_path)
    )
    job = installation.fail(job_id)
    assert job["reason"] == "invalid_program"
    assert "Traceback" not in job["message"]
    assert len(job["message"]) > len("rank 0: ")


def test_an_independent_job_keeps_its_world_size(installation: Installation) -> None:
    job_id = installation.submit(world_size=2, sleep_sec=0.1)
    installation.wait_until(job_id, lambda seen: all(pids(seen)))
    refused = installation.request("PATCH", f"/jobs/{job_id}", json={"world_size": 3})
    assert refused.status_code == httpx.codes.CONFLICT
    assert "keeps its world size of 2" in refused.text
    assert len(installation.see(job_id)["workers"]) == 2


def test_the_audit_of_a_job_that_goes_on_knows_what_is_durable(installation: Installation) -> None:
    job = PooledJob(installation, world_size=2)
    job.trains_with(0, 1)
    job.wait_until(lambda: job.audit()["epochs"])
    audit = job.audit()
    assert (audit["complete"], audit["exactly_once"]) == (False, None)
    assert audit["epochs"][0]["samples"] == audit["epochs"][0]["expected_samples"] == 512
    os.kill(job.active()[0], signal.SIGKILL)
    job.completes()
    assert [epoch["exactly_once"] for epoch in job.audit()["epochs"]] == [True] * 12


@pytest.mark.parametrize("deaths", [3, long(10)])
def test_the_death_of_all_ranks_again_and_again_changes_no_bit(
    installation: Installation, undisturbed: str, deaths: int
) -> None:
    job = PooledJob(installation, world_size=3)
    for first in range(0, 3 * deaths, 3):
        job.trains_with(*range(first, first + 3))
        job.wait_for_steps(1)
        for pid in job.active().values():
            os.kill(pid, signal.SIGKILL)
    assert job.completes() == undisturbed
    assert job.see()["endings"]["killed"] == 3 * deaths


@pytest.mark.parametrize("spares", [long(0), 1])
def test_a_random_schedule_changes_no_bit(installation: Installation, spares: int) -> None:
    undisturbed = PooledJob(installation, world_size=1, epochs=LONG["epochs"])
    undisturbed.hurries()
    schedule = Schedule(installation, seed=2, spares=spares, kills=3, others=4)
    assert schedule.runs() == undisturbed.completes()
