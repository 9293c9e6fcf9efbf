"""What is asked of Slurm, what its answers mean, and where ranks go on a scheduler's hosts."""

import asyncio
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from coordinator.decide.actions import ActionTaken, AgentWaits, PlaceRank, StartAgent
from coordinator.decide.fold import fold
from coordinator.decide.placement import place
from coordinator.decide.state.job import AgentSnapshot, JobSnapshot, new_rank
from coordinator.launchers.launcher import NotStarted
from coordinator.launchers.scheduler import (
    Refused,
    SchedulerJob,
    SchedulerJobs,
    SchedulerLauncher,
    SchedulerProbe,
    SchedulerUnavailable,
)
from coordinator.launchers.slurm import Slurm, parse_jobs
from database.records import Job
from muster.cluster.description import cluster_of_service
from muster.cluster.requests import sbatch_script, sbatch_words
from muster.contracts.job.engine import agent_job_name
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.messages.attach import JoinOrder
from muster.host.processes import module_command
from tests.support.database_samples import NOON

SPEC = JobSpec(
    engine="slurm", world_size=5, mode="synchronous", engine_options={"ranks_per_host": 2}
)


ORDER = JoinOrder(
    job_uid="u",
    host="slurm-1",
    agent_number=2,
    token="secret",  # noqa: S106
    coordinator=CoordinatorAddress(host="10.0.0.1", port=7400),
)
ASSIGNMENT = AgentAssignment(
    **msgspec.structs.asdict(ORDER),
    job_root="",
    address_file="",
    is_managed=True,
    orphan_timeout_seconds=1.0,
    stop_grace_seconds=1.0,
    agent_heartbeat_seconds=1.0,
    max_log_bytes=1,
)


def test_the_order_is_in_the_script_and_on_no_command_line() -> None:
    first, command, content, end = sbatch_script(ORDER, module_command("worker.join")).splitlines()
    assert (first, end) == ("#!/bin/sh", "ORDER")
    assert "secret" not in command
    assert shlex.split(command)[-2:] == ["worker.join", "<<ORDER"]
    assert msgspec.json.decode(content, type=JoinOrder) == ORDER


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
        ("7|n|RUNNING|None|T|0|", (False, False, "Slurm job 7: RUNNING")),
        ("7|n|COMPLETING|None|T|0|", (False, False, "Slurm job 7: COMPLETING")),
        ("7|n|CANCELLED by 0|None|T|0|", (False, True, "Slurm job 7: CANCELLED")),
        ("7|n|NODE_FAIL|None|T|0|", (False, True, "Slurm job 7: NODE_FAIL")),
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


def places(job: JobSnapshot) -> Iterator[PlaceRank]:
    return place(job, [], cluster_of_service(None, "n-0123456789ab", 1), {}, 0.0)


def test_hosts_are_filled_one_after_the_other() -> None:
    placed = [(it.rank, it.host) for it in places(snapshot())]
    hosts = ["slurm-1", "slurm-1", "slurm-2", "slurm-2", "slurm-3"]
    assert placed == [*enumerate(hosts)]


def test_an_agent_in_a_queue_is_neither_late_nor_lost() -> None:
    job = snapshot()
    job = fold(job, ActionTaken(action=next(places(job))), 0.0)
    job = fold(job, ActionTaken(action=StartAgent(host="slurm-1")), 0.0)
    waits = AgentWaits(host="slurm-1", agent_number=1, message="in a queue")
    agent = fold(job, waits, 900.0).agents["slurm-1"]
    assert agent.trouble is not None
    assert (agent.since, agent.seen_at, agent.trouble.message) == (900.0, 900.0, "in a queue")
    assert fold(job, msgspec.structs.replace(waits, agent_number=2), 900.0) == job


List = Mapping[str, SchedulerJob] | SchedulerUnavailable


class FakeScheduler:
    """Answers with the `lists` one after the other; an exception in place of one is raised."""

    name = "fake"

    def __init__(self, *lists: List, problem: str = "") -> None:
        """A `problem` is what it says about a submission, if it does not accept it."""
        self.lists = list(lists)
        self.cancelled: list[str] = []
        self.forgotten: list[str] = []
        self.submitted: list[str] = []
        self._problem = problem

    async def submit(self, name: str, *_: object) -> None:
        self.submitted.append(name)
        if self._problem:
            raise SchedulerUnavailable(self._problem)

    async def jobs(self) -> Mapping[str, SchedulerJob]:
        answer = self.lists.pop(0)
        if isinstance(answer, SchedulerUnavailable):
            raise answer
        return answer

    async def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)

    async def forget(self, job_id: str) -> None:
        self.forgotten.append(job_id)

    async def check(self) -> None: ...


RUNS = SchedulerJob(id="2", words="runs")
OVER = SchedulerJob(id="2", is_over=True, words="over")


@pytest.mark.parametrize(
    ("lists", "ended", "cancelled"),
    [
        ([{}], None, []),
        ([SchedulerUnavailable("away"), {"a2": OVER}], "ended (over)", []),
        ([{"a2": RUNS, "a1": SchedulerJob(id="1")}, {"a2": OVER}], "ended (over)", ["1"]),
        ([{"a2": RUNS, "a3": SchedulerJob(id="3")}, {}], None, []),
        ([{"a2": RUNS, "a1": SchedulerJob(id="1", is_over=True)}, {}], None, []),
    ],
)
def test_the_end_of_an_agent_is_that_of_its_job(
    monkeypatch: pytest.MonkeyPatch,
    lists: list[List],
    ended: str | None,
    cancelled: list[str],
) -> None:
    monkeypatch.setattr("coordinator.launchers.scheduler.LIST_SECONDS", 0.0)
    scheduler = FakeScheduler(*map(named, lists))

    async def check() -> None:
        agent = await launcher(scheduler).adopt("u", None)
        assert agent is not None
        assert await agent.ended == ended

    asyncio.run(check())
    assert scheduler.cancelled == cancelled
    over = {job.id for it in lists if isinstance(it, dict) for job in it.values() if job.is_over}
    assert {*scheduler.forgotten} == over


def named(jobs: List) -> List:
    """Complete the names of jobs from those of their agents' numbers."""
    prefix = agent_job_name("u", "slurm-1", 2).removesuffix("a2")
    return jobs if isinstance(jobs, Exception) else {prefix + key: it for key, it in jobs.items()}


def launcher(scheduler: FakeScheduler) -> SchedulerLauncher:
    return SchedulerLauncher(SchedulerJobs(scheduler), "u", "slurm-1", 2, SPEC)


@pytest.mark.parametrize(
    ("problem", "patience_seconds", "lists", "ended"),
    [
        ("", 1e9, [{}, {}, {"a2": RUNS}, {"a2": OVER}], "ended (over)"),
        ("", 1e9, [{}, {"a2": RUNS}, {}], None),
        ("", 0.0, [{}], "ended: slurm has taken its job and does not list it"),
        ("", 0.0, [{"a2": RUNS}, {}], None),
        ("it hangs", 1e9, [{}], "was not started (it hangs)"),
        ("it hangs", 1e9, [{"a2": RUNS}, {"a2": OVER}], "ended (over)"),
    ],
)
def test_a_job_is_submitted_once_and_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
    problem: str,
    patience_seconds: float,
    lists: list[List],
    ended: str | None,
) -> None:
    monkeypatch.setattr("coordinator.launchers.scheduler.LIST_SECONDS", 0.0)
    monkeypatch.setattr("coordinator.launchers.scheduler.UNLISTED_SECONDS", patience_seconds)
    scheduler = FakeScheduler(*map(named, lists), problem=problem)

    async def check() -> None:
        agent = await launcher(scheduler).start(ASSIGNMENT)
        assert await agent.ended == ended

    asyncio.run(check())
    assert scheduler.submitted == [agent_job_name("u", "slurm-1", 2)]


def test_jobs_of_others_and_of_later_agents_are_not_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coordinator.launchers.scheduler.LIST_SECONDS", 0.0)
    names = [("u", "slurm-1", 1), ("u", "slurm-1", 3), ("u", "slurm-10", 1), ("v", "slurm-1", 1)]
    jobs = {agent_job_name(*it): SchedulerJob(id=str(n)) for n, it in enumerate(names)}
    jobs |= {"muster-u-slurm-1-gone": SchedulerJob(id="8"), "train": SchedulerJob(id="9")}
    scheduler = FakeScheduler(jobs, {})
    asyncio.run(launcher(scheduler).sweep("u", ()))
    assert scheduler.cancelled == ["0"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("invalid partition specified: x", Refused),
        ("Batch job submission failed: Invalid account or account/partition combination", Refused),
        ("Batch job submission failed: Invalid qos specification", Refused),
        ("Batch job submission failed: Invalid feature specification", Refused),
        ("Invalid generic resource (gres) specification", Refused),
        ("Memory specification can not be satisfied", Refused),
        ("Batch job submission failed: Requested node configuration is not available", Refused),
        ("Batch job submission failed: Requested time limit is invalid", Refused),
        ("Batch job submission failed: User's group not permitted to use this partition", Refused),
        ("Job violates accounting/QOS policy (job submit limit, time limits)", NotStarted),
        ("AssocMaxSubmitJobLimit", NotStarted),
        ("QOSMaxSubmitJobPerUserLimit", NotStarted),
        ("Unable to contact slurm controller (connect failure)", SchedulerUnavailable),
        ("Socket timed out on send/recv operation", SchedulerUnavailable),
        ("Required partition not available (inactive or drain)", SchedulerUnavailable),
        ("", SchedulerUnavailable),
    ],
)
def test_what_sbatch_says_tells_whether_to_try_again(
    tmp_path: Path, words: str, expected: type[Exception]
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\necho {shlex.quote(f'sbatch: error: {words}')} >&2\nexit 1\n")
    sbatch.chmod(0o755)
    with pytest.raises(expected) as failed:
        asyncio.run(Slurm({"PATH": str(tmp_path)}).submit("n", ORDER, SPEC))
    assert (type(failed.value), words in str(failed.value)) == (expected, True)


@pytest.mark.parametrize("turns", range(2, 9, 2))  # while the command starts
def test_a_list_under_way_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, turns: int
) -> None:
    monkeypatch.setattr("coordinator.launchers.scheduler.LIST_SECONDS", 0.0)
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\n")
    squeue.chmod(0o755)

    async def end_early() -> None:
        jobs = SchedulerJobs(Slurm({"PATH": f"{tmp_path}:{os.environ['PATH']}"}))
        listing = asyncio.ensure_future(jobs.list_jobs())
        for _ in range(turns):
            await asyncio.sleep(0)
        listing.cancel()
        await jobs.close()

    asyncio.run(end_early())


@pytest.mark.parametrize(
    ("name", "job", "outcome"),
    [
        ("muster-unknown-slurm-1-a1", RUNS, "cancelled"),
        ("muster-over-slurm-12-a3", RUNS, "cancelled"),
        ("muster-live-slurm-1-a1", RUNS, "ours"),
        ("muster-unknown-slurm-1-a1", OVER, "ours"),
        ("muster-live-slurm-1-a1", OVER, "ours"),
        ("muster-over-slurm-1-a1", OVER, "forgotten"),
        ("muster-unknown-slurm-1", RUNS, "ours"),
        ("another-unknown-slurm-1-a1", RUNS, "ours"),
    ],
)
def test_a_sweep_touches_only_what_no_open_job_owns(
    monkeypatch: pytest.MonkeyPatch, name: str, job: SchedulerJob, outcome: str
) -> None:
    monkeypatch.setattr("coordinator.launchers.scheduler.LIST_SECONDS", 0.0)
    other = "muster-unknown-slurm-9-a9"
    listed = {name: job, other: SchedulerJob(id="9", words="waits")}
    scheduler = FakeScheduler(listed, listed)
    known = {
        JobUid(uid): row(uid, status) for uid, status in (("live", "RUNNING"), ("over", "FAILED"))
    }
    probe = SchedulerProbe(SchedulerJobs(scheduler), lambda _: known)
    before = asyncio.run(probe.sweep([]))
    assert len(before) == 1 + (outcome == "cancelled")
    assert scheduler.cancelled == []
    left = asyncio.run(probe.sweep([name, "muster-gone-slurm-1-a1"]))
    assert [(it.name, it.state, it.job_id) for it in left] == [(other, "waits", None)]
    assert scheduler.cancelled == (["2"] if outcome == "cancelled" else [])
    assert scheduler.forgotten == (["2"] * 2 if outcome == "forgotten" else [])


def row(uid: str, status: str) -> Job:
    return Job(
        job_id=JobId(f"job-{uid}"),
        uid=JobUid(uid),
        spec=SPEC,
        status=JobStatus(status),
        created_at=NOON,
        updated_at=NOON,
    )
