"""What is asked of Slurm, what its answers mean, and where ranks go on a scheduler's hosts."""

import asyncio
import shlex
from collections.abc import Mapping
from dataclasses import replace

import msgspec
import pytest

from coordinator.decide.actions import ActionTaken, AgentWaits, StartAgent
from coordinator.decide.fold import fold
from coordinator.decide.placement import place_on_scheduler
from coordinator.decide.state import AgentSnapshot, JobSnapshot, new_rank
from coordinator.launchers.scheduler import (
    SchedulerJob,
    SchedulerJobs,
    SchedulerLauncher,
    SchedulerProbe,
    SchedulerUnavailable,
)
from coordinator.launchers.slurm import parse_jobs, sbatch_words, script
from database.records import Job
from muster.contracts.attach import JoinOrder
from muster.contracts.engine import agent_job_name
from muster.contracts.job import JobId, JobStatus, JobUid
from muster.contracts.messages import CoordinatorAddress
from muster.contracts.spec import JobSpec
from tests.support.database_samples import NOON

SPEC = JobSpec(
    engine="slurm", world_size=5, mode="synchronous", engine_options={"ranks_per_host": 2}
)


def test_the_order_is_in_the_script_and_on_no_command_line() -> None:
    address = CoordinatorAddress(host="10.0.0.1", port=7400)
    order = JoinOrder(
        job_uid="u",
        host="slurm-1",
        generation=1,
        token="secret",  # noqa: S106
        coordinators=(address,),
    )
    first, command, content, end = script(order).splitlines()
    assert (first, end) == ("#!/bin/sh", "ORDER")
    assert "secret" not in command
    assert shlex.split(command)[-2:] == ["worker.join", "<<ORDER"]
    assert msgspec.json.decode(content, type=JoinOrder) == order


def test_options_become_words_of_sbatch() -> None:
    options = {"ranks_per_host": 2, "cpus_per_rank": 3, "partition": "gpu,big", "time": "1-12"}
    words = sbatch_words("a name", msgspec.structs.replace(SPEC, engine_options=options))
    assert {"--cpus-per-task=6", "--partition=gpu,big", "--time=1-12"} <= {*words}
    assert "--job-name=a name" in words
    assert not any(word.startswith(("--account", "--mem")) for word in words)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("7|n|PENDING|Resources|T|0|", (True, False, "Slurm job 7: PENDING, Resources, since T")),
        ("7|n|RUNNING|None|T|0|", (False, False, "Slurm job 7: RUNNING, since T")),
        ("7|n|COMPLETING|None|T|0|", (False, False, "Slurm job 7: COMPLETING, since T")),
        ("7|n|CANCELLED by 0|None|T|0|", (False, True, "Slurm job 7: CANCELLED, since T")),
        ("7|n|NODE_FAIL|None|T|0|", (False, True, "Slurm job 7: NODE_FAIL, since T")),
        ("7|n|FAILED|NonZeroExitCode|T|256|", (False, True, "its agent died")),
        ("7|n|FAILED|NonZeroExitCode|T|768|", (False, True, "exit code 3")),
    ],
)
def test_a_state_of_slurm_has_a_meaning(line: str, found: tuple[bool, bool, str]) -> None:
    job = parse_jobs(f"some noise\n{line}\n")["n"]
    assert (job.is_waiting, job.is_over) == found[:2]
    assert found[2] in job.words


def test_of_two_jobs_with_a_name_the_newer_one_counts() -> None:
    lines = ["9|n|RUNNING|None|T|0|", "10|n|PENDING|None|T|0|", "8|n|FAILED|None|T|0|"]
    assert parse_jobs("\n".join(lines))["n"].id == "10"


def snapshot(spec: JobSpec = SPEC) -> JobSnapshot:
    hosts = {
        name: AgentSnapshot(host=name, is_local=False, order=order)
        for order, name in enumerate(spec.scheduled_hosts)
    }
    return JobSnapshot(
        job_id=JobId("a"),
        uid=JobUid("u"),
        spec=spec,
        status=JobStatus.QUEUED,
        ranks=tuple(replace(new_rank(hosts, it), in_service=True) for it in range(5)),
        hosts=hosts,
        agents={},
    )


def test_hosts_are_filled_one_after_the_other() -> None:
    placed = [(it.rank, it.host) for it in place_on_scheduler(snapshot(), 0.0)]
    hosts = ["slurm-1", "slurm-1", "slurm-2", "slurm-2", "slurm-3"]
    assert placed == [*enumerate(hosts)]


def test_an_agent_in_a_queue_is_neither_late_nor_lost() -> None:
    job = snapshot()
    job = fold(job, ActionTaken(action=next(place_on_scheduler(job, 0.0))), 0.0)
    job = fold(job, ActionTaken(action=StartAgent(host="slurm-1")), 0.0)
    waits = AgentWaits(host="slurm-1", generation=1, message="in a queue")
    agent = fold(job, waits, 900.0).agents["slurm-1"]
    assert agent.trouble is not None
    assert (agent.since, agent.heard_at, agent.trouble.message) == (900.0, 900.0, "in a queue")
    assert fold(job, msgspec.structs.replace(waits, generation=2), 900.0) == job


class FakeScheduler:
    """Answers with the `lists` one after the other; an exception in place of one is raised."""

    name = "fake"

    def __init__(self, *lists: Mapping[str, SchedulerJob] | SchedulerUnavailable) -> None:
        self.lists = list(lists)
        self.cancelled: list[str] = []

    async def submit(self, *_: object) -> None:
        raise SchedulerUnavailable("it hangs")

    async def jobs(self) -> Mapping[str, SchedulerJob]:
        answer = self.lists.pop(0)
        if isinstance(answer, SchedulerUnavailable):
            raise answer
        return answer

    async def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    async def forget(self, job_id: str) -> None:
        assert job_id == "2"

    async def check(self) -> None: ...


RUNS = SchedulerJob(id="2", words="runs")
OVER = SchedulerJob(id="2", is_over=True, words="over")


@pytest.mark.parametrize(
    ("lists", "ended", "cancelled"),
    [
        ([{}], None, []),
        ([SchedulerUnavailable("away"), {"g2": OVER}], "ended (over)", []),
        ([{"g2": RUNS, "g1": SchedulerJob(id="1")}, {"g2": OVER}], "ended (over)", ["1"]),
        ([{"g2": RUNS, "g3": SchedulerJob(id="3")}, {}], None, []),
    ],
)
def test_the_end_of_an_agent_is_that_of_its_job(
    monkeypatch: pytest.MonkeyPatch,
    lists: list[Mapping[str, SchedulerJob] | SchedulerUnavailable],
    ended: str | None,
    cancelled: list[str],
) -> None:
    monkeypatch.setattr("coordinator.launchers.scheduler.LOOK_SECONDS", 0.0)
    name = agent_job_name("u", "slurm-1", 2).removesuffix("g2")
    named = [
        it if isinstance(it, Exception) else {name + key: job for key, job in it.items()}
        for it in lists
    ]
    scheduler = FakeScheduler(*named)

    async def check() -> None:
        launcher = SchedulerLauncher(SchedulerJobs(scheduler), "u", "slurm-1", 2, SPEC)
        agent = await launcher.adopt("u", None)
        assert agent is not None
        assert await agent.ended == ended

    asyncio.run(check())
    assert scheduler.cancelled == cancelled


@pytest.mark.parametrize(
    ("name", "job", "outcome"),
    [
        ("muster-unknown-slurm-1-g1", RUNS, "cancelled"),
        ("muster-over-slurm-12-g3", RUNS, "cancelled"),
        ("muster-live-slurm-1-g1", RUNS, "ours"),
        ("muster-unknown-slurm-1-g1", OVER, "ours"),
        ("muster-unknown-slurm-1", RUNS, "ours"),
        ("another-unknown-slurm-1-g1", RUNS, "ours"),
    ],
)
def test_a_sweep_touches_only_what_no_open_job_owns(
    monkeypatch: pytest.MonkeyPatch, name: str, job: SchedulerJob, outcome: str
) -> None:
    monkeypatch.setattr("coordinator.launchers.scheduler.LOOK_SECONDS", 0.0)
    other = "muster-unknown-slurm-9-g9"
    listed = {name: job, other: SchedulerJob(id="9", words="waits")}
    scheduler = FakeScheduler(listed, listed)
    known = {
        JobUid(uid): row(uid, status) for uid, status in (("live", "RUNNING"), ("over", "FAILED"))
    }
    probe = SchedulerProbe(SchedulerJobs(scheduler), lambda _: known)
    before = asyncio.run(probe.sweep([]))
    assert len(before) == 1 + (outcome == "cancelled")
    assert scheduler.cancelled == []
    left = asyncio.run(probe.sweep([name, "muster-gone-slurm-1-g1"]))
    assert [(it.name, it.state, it.job_id) for it in left] == [(other, "waits", None)]
    assert scheduler.cancelled == (["2"] if outcome == "cancelled" else [])


def row(uid: str, status: str) -> Job:
    return Job(
        job_id=JobId(f"job-{uid}"),
        uid=JobUid(uid),
        spec=SPEC,
        status=JobStatus(status),
        created_at=NOON,
        updated_at=NOON,
    )
