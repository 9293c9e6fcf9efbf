"""From the preparation of a job to the end of its agent."""

import asyncio
import subprocess
import sys
from asyncio import Future
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

import msgspec
import pytest

from coordinator.agents import launching
from coordinator.agents import lifecycle as agent_lifecycle
from coordinator.agents.launching import AgentStarter
from coordinator.agents.lifecycle import AgentLifecycle
from coordinator.decide.actions import AgentLost, DismissAgent, JobFailed, Observation
from coordinator.decide.state.job_end import JobFailure
from coordinator.decide.state.rank import Cause
from coordinator.launchers.launcher import AgentProcess, NotStarted
from coordinator.persistence import Attachment
from coordinator.preparation import Unprepared, choose_kernels, prepare
from coordinator.tracked_job import TrackedJob
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.host import HostFacts, common_environment
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobUid, Reason
from muster.contracts.messages.agent import RankExited
from muster.contracts.messages.assignment import AgentAssignment
from muster.contracts.messages.wire import ExitRecord
from muster.contracts.rank import ProcessRecord, ProcessState
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.host.processes import counts_waits, identify
from muster.job_defaults import ResolvedSpec, resolve
from muster.runtime.exit_report import write_own_record
from tests.support.database_samples import FACTS
from tests.support.installation import await_value
from tests.support.ranks import shard_paths
from tests.support.stories import Story, exited

DEADLINE_SECONDS = 20.0

BUSY = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nwhile True: pass"


def service_settings(root: Path) -> ServiceSettings:
    environ = {
        "MUSTER_DATA_DIR": str(root / "state"),
        "DATASET_DIR": str(root / "shards"),
        "CHECKPOINT_DIR": str(root / "checkpoints"),
    }
    return ServiceSettings.read(environ, cores=2)


async def holds_lease() -> bool:
    return True


# The end of an agent


@pytest.fixture
def finished(tmp_path: Path) -> TrackedJob:
    """A job whose only rank has recorded its exit with code 0."""
    job = Story.running(world_size=1).job
    files = DataDir(service_settings(tmp_path).data_dir).job(job.job_id)
    files.run.mkdir(parents=True)
    identity = job.ranks[0].attempt.identity
    assert identity is not None
    record = ExitRecord(pid=identity.pid, at="", said=(), exited=exited(0, 0, code=0))
    write_own_record(files, record)
    return TrackedJob(snapshot=job, attachment=Attachment(started_at=None))


class Sweeper:
    """A launcher that only sweeps."""

    def __init__(self, sweep: Callable[[], None]) -> None:
        self._sweep = sweep

    async def sweep(self, _job_uid: str, _known: Sequence[ProcessRecord]) -> None:
        self._sweep()

    def living(self, _records: Collection[ProcessRecord]) -> frozenset[ProcessRecord]:
        return frozenset()


@pytest.mark.skipif(not counts_waits(), reason="the kernel counts no waits")
def test_waits_of_an_agent_are_observed_while_it_is_late(tmp_path: Path) -> None:
    story = Story.running(world_size=1)
    job = TrackedJob(snapshot=story.job, attachment=Attachment(started_at=None))
    observed: list[Observation] = []
    lifecycle = AgentLifecycle(
        AgentStarter(local=Sweeper(lambda: None), settings=service_settings(tmp_path)), holds_lease
    )
    lifecycle.observe = lambda _uid, observation: observed.append(observation)
    command = [sys.executable, "-S", "-c", BUSY]
    loop = asyncio.new_event_loop()
    with subprocess.Popen(command) as process, subprocess.Popen(command) as rival:
        record = identify(process.pid)
        job.agents[LOCAL_HOST] = AgentProcess(job_uid="uid", record=record, ended=Future(loop=loop))
        lifecycle.note_starved([job], story.now + 1)
        assert observed == []

        def waits() -> bool:
            lifecycle.note_starved([job], story.now + 9)
            return observed[-1].seconds > 0

        await_value(waits, lambda: f"{observed}")
        process.kill()
        rival.kill()
    loop.close()


async def serve(_job: TrackedJob, _host: str) -> str:
    return "the agent has ended"


def test_a_lost_agent_is_reported_after_the_sweep(finished: TrackedJob, tmp_path: Path) -> None:
    happened: list[str] = []

    def observe(_uid: JobUid, observation: Observation) -> None:
        happened.append(type(observation).__name__)
        if isinstance(observation, AgentLost):
            assert observation.living == frozenset()
        if isinstance(observation, RankExited):
            assert observation.exit_code == 0

    launcher = Sweeper(lambda: happened.append("swept"))
    lifecycle = AgentLifecycle(
        AgentStarter(local=launcher, settings=service_settings(tmp_path)), holds_lease
    )
    lifecycle.observe = observe
    asyncio.run(lifecycle._attend(finished, LOCAL_HOST, serve))  # noqa: SLF001
    assert happened == ["swept", "RankExited", "AgentLost"]


def test_a_failed_sweep_reports_nothing_and_is_raised(finished: TrackedJob, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(24, "Too many open files")

    observed: list[Observation] = []

    async def attend() -> None:
        lifecycle = AgentLifecycle(
            AgentStarter(local=Sweeper(fail), settings=service_settings(tmp_path)), holds_lease
        )
        lifecycle.raise_error()
        lifecycle.observe = lambda _, it: observed.append(it)
        life = lifecycle._attend(finished, LOCAL_HOST, serve)  # noqa: SLF001
        lifecycle._run(life, finished.snapshot.uid, LOCAL_HOST)  # noqa: SLF001
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not lifecycle.is_idle:  # noqa: ASYNC110
                await asyncio.sleep(0)
        lifecycle.raise_error()

    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(attend())
    assert observed == []


# Another host


ELSEWHERE = "gpu-box"


@pytest.fixture
def elsewhere(finished: TrackedJob) -> TrackedJob:
    """The same job on a host whose files are not those that are seen here."""
    job = finished.snapshot
    agent = replace(job.agents[LOCAL_HOST], host=ELSEWHERE, is_local=False)
    ranks = tuple(replace(rank, host=ELSEWHERE) for rank in job.ranks)
    finished.snapshot = replace(job, agents={ELSEWHERE: agent}, ranks=ranks)
    return finished


class OtherHost:
    """A launcher of a host of which nothing is known."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def start(self, _assignment: AgentAssignment) -> AgentProcess:
        self.calls.append("not started")
        raise NotStarted("no route")

    async def sweep(self, _job_uid: str, _known: Sequence[ProcessRecord]) -> None:
        self.calls.append("swept")

    def living(self, records: Collection[ProcessRecord]) -> frozenset[ProcessRecord]:
        return frozenset(records)


def lost_elsewhere(
    root: Path, job: TrackedJob, serve: Callable[[TrackedJob, str], Awaitable[str]]
) -> tuple[list[Observation], list[str]]:
    """Return what is observed of an agent's end there, and what its launcher has done."""
    observed: list[Observation] = []
    launcher = OtherHost()
    lifecycle = AgentLifecycle(
        AgentStarter(local=launcher, others={ELSEWHERE: launcher}, settings=service_settings(root)),
        holds_lease,
    )
    lifecycle.observe = lambda _, it: observed.append(it)
    asyncio.run(lifecycle._attend(job, ELSEWHERE, serve))  # noqa: SLF001
    return observed, launcher.calls


def test_an_ended_agent_elsewhere_tells_nothing_of_its_ranks(
    elsewhere: TrackedJob, tmp_path: Path
) -> None:
    (lost,), calls = lost_elsewhere(tmp_path, elsewhere, serve)
    assert isinstance(lost, AgentLost)
    assert (lost.living, lost.newest, calls) == (frozenset({0}), 0, [])


@pytest.mark.parametrize("has_ranks", [True, False])
def test_a_host_out_of_reach_is_swept_for_ranks_only(
    elsewhere: TrackedJob, tmp_path: Path, *, has_ranks: bool
) -> None:
    job = elsewhere.snapshot
    attempt = job.ranks[0].attempt
    kill = Cause(reason=Reason.STOPPED_BY_USER, message="too late")
    left = replace(attempt, intent=replace(attempt.intent, kill=kill))
    gone = replace(attempt, process=ProcessState.EXITED)
    rank = replace(job.ranks[0], attempt=left if has_ranks else gone)
    elsewhere.snapshot = job.with_rank(rank)

    async def refuse(_job: TrackedJob, _host: str) -> str:
        raise NotStarted("gpu-box cannot be used: no route")

    (lost,), calls = lost_elsewhere(tmp_path, elsewhere, refuse)
    assert isinstance(lost, AgentLost)
    assert lost.message.endswith("gpu-box cannot be used: no route")
    assert calls == ["swept"] * has_ranks


def test_a_host_that_was_given_up_is_cleaned_also_if_no_agent_starts(
    elsewhere: TrackedJob, tmp_path: Path
) -> None:
    """The job may end before the host answers again: nothing else ends what it has there."""

    async def give_up_and_start() -> None:
        lifecycle = AgentLifecycle(
            AgentStarter(local=other, others={ELSEWHERE: other}, settings=settings), holds_lease
        )
        lifecycle.give_up(elsewhere, ELSEWHERE)
        lifecycle.start(elsewhere, ELSEWHERE)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not lifecycle.is_idle:  # noqa: ASYNC110
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # the sweep begins
        await lifecycle.detach()

    other, settings = OtherHost(), service_settings(tmp_path)
    elsewhere.places = resolve(elsewhere.snapshot.spec, settings, tmp_path)
    elsewhere.snapshot = replace(
        elsewhere.snapshot, ranks=(replace(elsewhere.snapshot.ranks[0], host=LOCAL_HOST),)
    )
    asyncio.run(give_up_and_start())
    assert other.calls == ["not started", "swept"]


def test_the_late_end_of_an_agent_does_not_touch_the_next_one(
    elsewhere: TrackedJob, tmp_path: Path
) -> None:
    async def serve_late(job: TrackedJob, host: str) -> str:
        agent = job.snapshot.agents[host]
        job.snapshot = job.snapshot.with_agent(replace(agent, agent_number=agent.agent_number + 1))
        return await serve(job, host)

    assert lost_elsewhere(tmp_path, elsewhere, serve_late) == ([], [])


@pytest.mark.parametrize("is_evidence", [True, False])
def test_no_task_waits_for_an_agent_that_was_given_up(
    elsewhere: TrackedJob, tmp_path: Path, *, is_evidence: bool
) -> None:
    async def give_up() -> None:
        others = {ELSEWHERE: OtherHost()}
        lifecycle = AgentLifecycle(
            AgentStarter(local=OtherHost(), others=others, settings=service_settings(tmp_path)),
            holds_lease,
        )
        ended = asyncio.get_running_loop().create_future()
        elsewhere.agents[ELSEWHERE] = AgentProcess(
            job_uid="", record=None, ended=ended, is_evidence=is_evidence
        )
        await lifecycle.adopt(elsewhere)
        assert not lifecycle.is_idle
        await asyncio.sleep(0)  # it waits for the end
        lifecycle.give_up(elsewhere, ELSEWHERE)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not lifecycle.is_idle:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert elsewhere.agents == {}
        assert ended.cancelled()

    asyncio.run(give_up())


# Dismissal before the agent was ever connected


class Launcher:
    """Agents that run until they are killed; `on_start` is called while one is being started."""

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self.calls: list[str] = []

    async def start(self, assignment: AgentAssignment) -> AgentProcess:
        self.calls.append("started")
        self._on_start()
        ended = asyncio.get_running_loop().create_future()
        return AgentProcess(job_uid=assignment.job_uid, record=None, ended=ended)

    async def kill(self, agent: AgentProcess) -> None:
        self.calls.append("killed")
        agent.ended.set_result(-9)

    async def sweep(self, _job_uid: str, _known: Sequence[ProcessRecord]) -> None:
        self.calls.append("swept")

    def living(self, _records: Collection[ProcessRecord]) -> frozenset[ProcessRecord]:
        return frozenset()


class Dismissal:
    """An admitted job that is dismissed at one moment of its agent's start."""

    def __init__(self, root: Path, moment: str) -> None:
        self._story = Story.submitted(world_size=1).is_admitted()
        self._story.plans()
        job = self._story.job
        settings = service_settings(root)
        self.files = DataDir(settings.data_dir).job(job.job_id)
        self.observed: list[Observation] = []
        self.launcher = Launcher(self._is_starting)
        self._job = TrackedJob(snapshot=job, attachment=Attachment(started_at=None))
        self._lifecycle = AgentLifecycle(
            AgentStarter(local=self.launcher, settings=settings), holds_lease
        )
        self._lifecycle.observe = self._observe
        self._moment = moment
        self._dismissed = Event()
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Start the agent and wait until it is reported as lost."""
        self._loop = asyncio.get_running_loop()
        self._lifecycle.start(self._job, LOCAL_HOST)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self._lost.wait()

    def reach(self, moment: str) -> None:
        if moment == self._moment and not self._dismissed.is_set():
            self._job.snapshot = self._story.takes(DismissAgent(host=LOCAL_HOST)).job
            self._lifecycle.dismiss(self._job, LOCAL_HOST)
            self._dismissed.set()

    def reach_in_thread(self, moment: str) -> None:
        if moment == self._moment:
            self._loop.call_soon_threadsafe(self.reach, moment)
            assert self._dismissed.wait(DEADLINE_SECONDS)

    def _is_starting(self) -> None:
        self.reach("starting")
        self._loop.call_soon(self.reach, "started")

    def _observe(self, _uid: JobUid, observation: Observation) -> None:
        self.observed.append(observation)
        if isinstance(observation, AgentLost):
            self._lost.set()


@pytest.mark.parametrize(
    ("moment", "calls"),
    [
        ("preparing", ["swept"]),
        ("claiming", ["swept"]),
        ("starting", ["started", "killed", "swept"]),
        ("started", ["started", "killed", "swept"]),
    ],
)
def test_an_agent_can_be_dismissed_at_any_moment_of_its_start(
    moment: str, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dismissal = Dismissal(tmp_path, moment)

    def slow_prepare(*_: object, **__: object) -> ResolvedSpec:
        dismissal.reach_in_thread("preparing")
        return resolve(JobSpec(), service_settings(tmp_path), tmp_path)

    def claim(*_: object) -> None:
        dismissal.files.root.mkdir(parents=True)
        dismissal.reach_in_thread("claiming")

    monkeypatch.setattr(launching, "prepare", slow_prepare)
    monkeypatch.setattr(launching, "claim_directory", claim)
    monkeypatch.setattr(agent_lifecycle, "DISMISSAL_SECONDS", 0.0)
    asyncio.run(dismissal.run())
    assert dismissal.launcher.calls == calls
    assert [type(one) for one in dismissal.observed] == [AgentLost]
    assert dismissal.files.root.exists() == (moment != "preparing")


def test_an_unprepared_job_fails_without_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dismissal = Dismissal(tmp_path, moment="never")

    def refuse(*_: object, **__: object) -> ResolvedSpec:
        raise Unprepared(JobFailure(reason=Reason.INVALID_DATASET, message="there is no data"))

    monkeypatch.setattr(launching, "prepare", refuse)
    asyncio.run(dismissal.run())
    assert [type(one) for one in dismissal.observed] == [JobFailed, AgentLost]
    assert dismissal.launcher.calls == []


# Preparation


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return service_settings(tmp_path)


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    return tmp_path / "state" / "datasets" / "synthetic"


def write_shard(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "shard_00000.txt").write_text('{"x":[1],"y":0}\n')
    return directory


def refusal(spec: JobSpec, settings: ServiceSettings) -> tuple[Reason, str]:
    with pytest.raises(Unprepared) as caught:
        prepare(spec, settings)
    return caught.value.failure.reason, caught.value.failure.message


def test_the_synthetic_data_set_is_created_once(settings: ServiceSettings, synthetic: Path) -> None:
    spec = JobSpec(dataset_dir=str(synthetic))
    places = prepare(spec, settings)
    assert places.dataset_dir == synthetic
    made = {shard: shard.stat() for shard in shard_paths(synthetic)}
    assert len(made) == 8
    assert prepare(spec, settings) == places
    assert {shard: shard.stat() for shard in shard_paths(synthetic)} == made


def test_a_job_never_changes_its_data_set(
    settings: ServiceSettings, synthetic: Path, tmp_path: Path
) -> None:
    of_synthetic = resolve(JobSpec(), settings, tmp_path).spec
    shards = write_shard(tmp_path / "shards")
    assert prepare(of_synthetic, settings).dataset_dir == synthetic
    of_default = resolve(JobSpec(), settings, tmp_path).spec
    shards.rename(tmp_path / "elsewhere")
    reason, _ = refusal(of_default, settings)
    assert reason is Reason.INVALID_DATASET


def test_an_incomplete_stored_job_is_completed_first(
    settings: ServiceSettings, synthetic: Path, tmp_path: Path
) -> None:
    places = prepare(JobSpec(), settings)
    assert places.dataset_dir == synthetic
    assert places.checkpoint_dir == tmp_path / "checkpoints"
    assert places.working_dir == Path.cwd()
    assert len(shard_paths(synthetic)) == 8


def test_the_named_data_set_is_used(settings: ServiceSettings, tmp_path: Path) -> None:
    write_shard(tmp_path / "shards")
    named = write_shard(tmp_path / "named")
    assert prepare(JobSpec(dataset_dir=str(named)), settings).dataset_dir == named


@pytest.mark.parametrize("name", ["gone", "."])
def test_a_named_data_set_without_shards_is_refused(
    settings: ServiceSettings, tmp_path: Path, name: str
) -> None:
    reason, message = refusal(JobSpec(dataset_dir=str(tmp_path / name)), settings)
    assert reason is Reason.INVALID_DATASET
    assert str(tmp_path / name) in message
    assert not (tmp_path / "state").exists(), "no other data set is created instead"


def test_ranks_that_start_elsewhere_need_no_data_here(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    spec = JobSpec(dataset_dir=str(tmp_path / "gone"), working_dir=str(tmp_path / "gone"))
    places = prepare(spec, settings, is_start_here=False)
    assert places.dataset_dir == places.working_dir == tmp_path / "gone"


def test_an_unreadable_default_data_set_is_refused(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "shard_00000.txt").symlink_to(tmp_path / "gone")
    reason, message = refusal(JobSpec(), settings)
    assert reason is Reason.INVALID_DATASET
    assert "shard_00000.txt" in message


def test_a_command_may_run_without_data(settings: ServiceSettings, tmp_path: Path) -> None:
    spec = JobSpec(command=("true",), dataset_dir=str(tmp_path / "gone"))
    assert prepare(spec, settings).dataset_dir == tmp_path / "gone"


@pytest.mark.parametrize("working_dir", ["gone", "file", "x" * 4000])
def test_a_missing_working_directory_fails_the_job(
    settings: ServiceSettings, tmp_path: Path, working_dir: str
) -> None:
    (tmp_path / "file").touch()
    spec = JobSpec(command=("true",), working_dir=str(tmp_path / working_dir))
    reason, message = refusal(spec, settings)
    assert reason is Reason.INVALID_PROGRAM
    assert str(tmp_path / working_dir) in message


def test_the_numeric_environment_is_chosen_once_and_for_good(elsewhere: TrackedJob) -> None:
    """A successor starts from the row: other facts must not change the bits of the job."""
    alike = {ELSEWHERE: FACTS, LOCAL_HOST: FACTS}
    older = {**alike, ELSEWHERE: msgspec.structs.replace(FACTS, blas_kernel="Nehalem")}
    job = elsewhere.snapshot
    hosts = {LOCAL_HOST: replace(job.agents[ELSEWHERE], host=LOCAL_HOST), **job.agents}
    spec = msgspec.structs.replace(job.spec, mode="synchronous")
    elsewhere.snapshot = replace(job, hosts=hosts, spec=spec)

    def chosen(facts: dict[str, HostFacts]) -> object:
        async def answer() -> dict[str, HostFacts]:
            return facts

        asyncio.run(choose_kernels(elsewhere, answer))
        return elsewhere.attachment.numeric_environment

    assert chosen(alike) == {}
    assert chosen(older) == {}
    elsewhere.attach(numeric_environment=None)
    assert chosen(older) == common_environment(older)[0]
    assert chosen(alike) == common_environment(older)[0]
