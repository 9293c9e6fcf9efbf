"""Defaults, absolute paths, refusals with the field's name, remarks, and the group commit."""

import asyncio
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from api.errors import Conflict, InvalidRequest
from api.submission import Outcomes, SubmissionQueue, Submitter
from database.errors import DatabaseError, DatabaseUnavailable, JobExists
from database.jobs import NewJob
from database.records import Job, utc_now
from muster.checkpoints.manager import CheckpointManager
from muster.checkpoints.manifest import BEST, Owner
from muster.checkpoints.store import open_store
from muster.cluster.description import Cluster, ClusterNode, cluster_of_service
from muster.contracts.job.field_types import ResumeFrom
from muster.contracts.job.spec import JobRequest
from muster.contracts.job.status import JobId
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.contracts.shards import Position
from tests.unit.api.jobs import JOB

pytestmark = pytest.mark.anyio

TIMEOUT_SECONDS = 20.0
SEARCH_PATH = "/usr/bin:/bin"


@pytest.fixture
def submitter(tmp_path: Path) -> Submitter:
    environment = {
        "CHECKPOINT_DIR": str(tmp_path / "ckpt"),
        "DATASET_DIR": str(tmp_path / "data"),
        "MUSTER_DATA_DIR": str(tmp_path / "state"),
    }
    return Submitter(
        settings=ServiceSettings.read(environment, cores=2),
        read_cluster=lambda: cluster_of_service(None, "n-0123456789ab", slots=4),
        working_dir=tmp_path,
        clock=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        random_hex=lambda: "abcdef0123456789",
        checkpoint_dir_of={"before": str(tmp_path / "earlier")}.get,
        search_path=SEARCH_PATH,
    )


def refusal(submitter: Submitter, **fields: object) -> str:
    """Return the field that is refused."""
    with pytest.raises(InvalidRequest) as refused:
        submitter.prepare(JobRequest(**fields))
    (error,) = refused.value.errors
    return str(error.loc[-1])


def test_a_generated_id_sorts_by_time(submitter: Submitter) -> None:
    assert submitter.prepare(JobRequest()).job_id == "job-20260102t030405-vpg66ajd"


def test_relative_paths_start_at_the_servers_directory(
    submitter: Submitter, tmp_path: Path
) -> None:
    for name in ("mine", "work"):
        (tmp_path / name).mkdir()
    paths = {"dataset_dir": "mine", "working_dir": "work", "checkpoint_dir": "saved"}
    spec = submitter.prepare(JobRequest(command=("true",), **paths)).spec
    assert spec.dataset_dir == str(tmp_path / "mine")
    assert spec.working_dir == str(tmp_path / "work")
    assert spec.checkpoint_dir == str(tmp_path / "saved")


def test_compression_on_one_host_is_remarked(submitter: Submitter) -> None:
    message = submitter.prepare(JobRequest(compression="int8")).message
    assert message is not None
    assert "compression int8 saves nothing on one host" in message


def test_remarks_become_the_message(submitter: Submitter) -> None:
    assert submitter.prepare(JobRequest(command=("true",), world_size=4)).message is None
    many = submitter.prepare(JobRequest(command=("true",), world_size=100)).message
    assert many is not None
    assert many.startswith("100 ranks are more than the 4 slots there are (MUSTER_SLOTS): ")
    shown = JobRequest(command=("true",), env={"HF_TOKEN": "hf_1"})
    assert submitter.prepare(shown).message == (
        "env shows HF_TOKEN to everyone who may submit jobs: use secrets instead"
    )


@pytest.mark.parametrize("needs", [{"vram_mb": 1}, {"ram_mb": 1}, {"hosts": ("box",)}])
def test_needs_of_a_cluster_are_refused_without_one(
    submitter: Submitter, needs: dict[str, object]
) -> None:
    (field,) = needs
    with pytest.raises(InvalidRequest, match=f"{field}: needs a cluster: set MUSTER_CLUSTER"):
        submitter.prepare(JobRequest(**needs))


HERE = ClusterNode(name="here", host="10.0.0.1", slots=2, ram_mb=4096, max_adapters=2)
BOX = ClusterNode(name="box", host="10.0.0.2", transport="ssh", slots=2)
OTHER_HOSTS: dict[str, tuple[dict[str, object], str | None]] = {
    "together": ({"world_size": 4, "mode": "synchronous"}, None),
    "only here": ({"world_size": 2, "hosts": ("here",)}, None),
    "an object store": ({"world_size": 4, "checkpoint_dir": "s3://bucket/runs"}, None),
    "no such host": ({"hosts": ("nowhere",)}, "there is no node 'nowhere': use one of here, box"),
    "too many ranks": (
        {"world_size": 5},
        "only 4 of 5 ranks fit on the nodes of the cluster file if free",
    ),
    "needs that no host has": ({"world_size": 1, "vram_mb": 1}, "here: it has no GPU; box: it"),
    "apart": ({"world_size": 4, "mode": "independent"}, None),
    "only elsewhere": ({"world_size": 2, "mode": "synchronous", "hosts": ("box",)}, None),
}


@pytest.mark.parametrize(("fields", "why"), OTHER_HOSTS.values(), ids=OTHER_HOSTS)
def test_a_job_needs_hosts(
    submitter: Submitter, fields: dict[str, object], why: str | None
) -> None:
    submitter = replace(submitter, read_cluster=lambda: Cluster(nodes=(HERE, BOX)))
    request = JobRequest(**fields)
    if why is not None:
        with pytest.raises(InvalidRequest, match=why):
            submitter.prepare(request)
    elif "s3" not in str(fields):
        submitter.prepare(request)


def test_a_checkpoint_dir_that_cannot_be_written_is_refused(
    submitter: Submitter, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", Path("/proc/saved")):  # root may write to all but the last
        with pytest.raises(InvalidRequest, match="the service's user cannot write to /"):
            submitter.prepare(JobRequest(command=("true",), checkpoint_dir=str(place)))


def test_command_that_cannot_run_is_refused(submitter: Submitter, tmp_path: Path) -> None:
    name = "muster-test-command"  # that no machine has
    (tmp_path / name).touch(mode=0o755)
    assert refusal(submitter, command=(name,)) == "command"
    own = {"PATH": str(tmp_path)}
    submitter.prepare(JobRequest(command=(name,), env=own))
    submitter = replace(submitter, search_path=str(tmp_path))
    submitter.prepare(JobRequest(command=("python", "-c", "")))  # the agent has one
    assert refusal(submitter, command=("python", "train.py")) == "command"
    assert refusal(submitter, command=("python", "-c", ""), env=own) == "command"


def test_an_interpreter_of_an_image_is_not_looked_for_here(submitter: Submitter) -> None:
    settings = msgspec.structs.replace(submitter.settings, engines=frozenset({"kubernetes"}))
    image = {"engine": "kubernetes", "engine_options": {"image": "IMAGE"}}
    there = JobRequest(command=("python", "-c", ""), python="/opt/conda/bin/python", **image)
    spec = replace(submitter, settings=settings).prepare(there).spec
    assert spec.python == "/opt/conda/bin/python"


def test_without_any_data_the_synthetic_set_is_announced(submitter: Submitter) -> None:
    submission = submitter.prepare(JobRequest())
    assert submission.message is not None
    assert "synthetic" in submission.message
    assert submission.spec.dataset_dir == str(
        DataDir(submitter.settings.data_dir).synthetic_dataset
    )


def test_a_file_that_looks_like_data_is_named_in_the_message(
    submitter: Submitter, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    for name in ("shard_00000.txt", "shard_00001.txt.gz"):
        (tmp_path / "data" / name).write_text("{}\n")
    message = submitter.prepare(JobRequest()).message
    assert message is not None
    assert "data: shard_00001.txt.gz will not be read" in message


def test_an_unreadable_default_data_set_is_refused(submitter: Submitter, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard_00000.txt").symlink_to(tmp_path / "gone")
    assert refusal(submitter) == "dataset_dir"


def test_a_program_without_any_data_is_refused(submitter: Submitter) -> None:
    assert refusal(submitter, mode="synchronous", program="module:Net") == "dataset_dir"


def test_a_program_is_looked_for_in_the_working_directory(
    submitter: Submitter, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard_00000.txt").write_text("line\n")
    for program in ("train.py:Net", "package.module:Net"):
        request = JobRequest(mode="synchronous", program=program, working_dir="work")
        assert submitter.prepare(request).spec.program == program
    assert refusal(submitter, mode="synchronous", program="train.py:Net") == "program"


def test_leftover_checkpoints_need_resume_from(submitter: Submitter, tmp_path: Path) -> None:
    (tmp_path / "ckpt" / "a").mkdir(parents=True)
    (tmp_path / "ckpt" / "a" / ".FENCE.g0004.8d777f385d3dfec8").touch()
    submitter.prepare(JobRequest(job_id="a"))
    with pytest.raises(InvalidRequest, match="holds no checkpoints"):
        submitter.prepare(JobRequest(job_id="b", resume_from="a"))
    (tmp_path / "ckpt" / "a" / "LATEST").write_text("step_0000000001.g0000\n")
    with pytest.raises(Conflict, match="resume_from"):
        submitter.prepare(JobRequest(job_id="a"))
    submitter.prepare(JobRequest(job_id="a", resume_from="a"))
    submitter.prepare(JobRequest(job_id="b", resume_from="a"))


def test_checkpoints_of_a_stored_job_mean_that_its_id_is_taken(
    submitter: Submitter, tmp_path: Path
) -> None:
    (tmp_path / "ckpt" / "before").mkdir(parents=True)
    (tmp_path / "ckpt" / "before" / "LATEST").write_text("step_0000000001.g0000\n")
    with pytest.raises(JobExists):
        submitter.prepare(JobRequest(job_id="before"))


def test_a_job_resumes_where_the_earlier_one_saved(submitter: Submitter, tmp_path: Path) -> None:
    (tmp_path / "earlier" / "before").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="holds no checkpoints"):
        submitter.prepare(JobRequest(resume_from="before"))
    (tmp_path / "earlier" / "before" / "LATEST").write_text("step_0000000001.g0000\n")
    spec = submitter.prepare(JobRequest(resume_from="before")).spec
    assert spec.checkpoint_dir == str(tmp_path / "earlier")


def test_a_refused_resume_names_the_earlier_directory(submitter: Submitter, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        submitter.prepare(JobRequest(resume_from="before", checkpoint_dir="other"))
    (error,) = refused.value.errors
    assert error.msg == (
        f"{tmp_path}/other/before holds no checkpoints; job before saved to "
        f"{tmp_path}/earlier/before: leave out checkpoint_dir to use it"
    )


@pytest.mark.parametrize(
    ("mode", "left", "other"),
    [
        ("synchronous", "worker_0/step_0000000042.g0003", "independent"),
        ("independent", "step_0000000042.g0003", "synchronous"),
    ],
)
def test_checkpoints_of_another_mode_are_refused(
    submitter: Submitter, tmp_path: Path, mode: str, left: str, other: str
) -> None:
    (tmp_path / "ckpt" / "a" / left).mkdir(parents=True)
    for job_id in ("a", "b"):
        with pytest.raises(Conflict, match=other) as refused:
            submitter.prepare(JobRequest(job_id=job_id, mode=mode, resume_from="a"))
        assert refused.value.slug == "checkpoints-of-another-mode"
        submitter.prepare(JobRequest(job_id=job_id, mode=other, resume_from="a"))


@pytest.mark.parametrize(
    ("field", "made", "given"),
    [
        ("virtual_shards", 32, 16),
        ("batch_size", 64, 128),
        ("seed", 0, 1),
        ("compression", "none", "int8"),
    ],
)
def test_resume_with_another_schedule_is_refused(
    submitter: Submitter, tmp_path: Path, field: str, made: object, given: object
) -> None:
    values = {"batch_size": 64, "seed": 0}
    owner = Owner(job_id="a", job_uid="a", rank=0, world_size=1, generation=1)
    manager = CheckpointManager(
        store=open_store(tmp_path / "ckpt" / "a"),
        owner=owner,
        keep_last=1,
        clock=utc_now,
        warn=lambda _: None,
    )
    manager.save(1, Position(step=1), {"muster.course": values, "muster.virtual_shards": 32})
    submitter.prepare(JobRequest(job_id="b", resume_from="a", epochs=9))
    submitter.prepare(
        JobRequest(job_id="b", resume_from="a", mode="synchronous", command=("true",))
    )
    with pytest.raises(Conflict, match=f"{field} {made}, and this job has {given}") as refused:
        submitter.prepare(JobRequest(job_id="b", resume_from="a", **{field: given}))
    assert refused.value.slug == "checkpoints-of-another-schedule"


RESUMED = [
    ("a", "a"),
    ("a:4", "a:4"),
    ("a:best", "a:2"),
    (ResumeFrom("a", "best"), "a:2"),
    ("a:3", "holds no checkpoint of step 3: it has steps 2, 4, 5"),
    ("plain:best", "holds no best checkpoint: its job has no keep_best"),
    ("missing:2", "holds no checkpoints, and there is no job missing"),
]


@pytest.mark.parametrize(("asked", "wanted"), RESUMED)
def test_a_job_resumes_from_the_step_that_is_asked(
    submitter: Submitter, tmp_path: Path, asked: str | ResumeFrom, wanted: str
) -> None:
    for job_id, best in (("a", {BEST: 0.5}), ("plain", {})):
        manager = CheckpointManager(
            store=open_store(tmp_path / "ckpt" / job_id),
            owner=Owner(job_id=job_id, job_uid=job_id, rank=0, world_size=1, generation=1),
            keep_last=2,
            clock=utc_now,
            warn=lambda _: None,
        )
        for step in range(1, 6):
            manager.save(step, Position(step=step), best if step == 2 else {})
    request = JobRequest(job_id="b", mode="synchronous", resume_from=asked)
    if "holds" not in wanted:
        assert submitter.prepare(request).spec.resume_from == wanted
        return
    with pytest.raises(InvalidRequest, match=wanted) as refused:
        submitter.prepare(request)
    assert refused.value.errors[0].loc == ("body", "resume_from")


# Group commit


class Store:
    """Stores the creations it receives, once it is released."""

    def __init__(self) -> None:
        self.stored: list[list[str]] = []
        self.begun = threading.Event()
        self.released = threading.Event()
        self.failure: BaseException | None = None
        self.refusals: dict[str, DatabaseError] = {}
        self.queue = SubmissionQueue(self._store)

    def _store(self, new_jobs: Sequence[NewJob]) -> Outcomes:
        self.begun.set()
        assert self.released.wait(TIMEOUT_SECONDS)
        if self.failure is not None:
            raise self.failure
        outcomes = [
            self.refusals.get(new.job_id) or replace(JOB, job_id=new.job_id) for new in new_jobs
        ]
        self.stored.append([job.job_id for job in outcomes if isinstance(job, Job)])
        return outcomes

    async def while_one_is_stored(self, *others: NewJob) -> list[Job | BaseException]:
        """Submit `others` while the job "first" is being stored; return all results."""
        first = asyncio.create_task(self.queue.store(creates("first")))
        await asyncio.to_thread(self.begun.wait, TIMEOUT_SECONDS)
        coming = [asyncio.create_task(self.queue.store(other)) for other in others]
        await asyncio.sleep(0)
        self.released.set()
        return await asyncio.gather(first, *coming, return_exceptions=True)


def creates(name: str) -> NewJob:
    return NewJob(JobId(name), JOB.uid, JOB.spec, None, None)


def test_jobs_that_arrive_meanwhile_share_a_transaction() -> None:
    store, exists = Store(), JobExists(JobId("b"))
    store.refusals["b"] = exists
    results = asyncio.run(store.while_one_is_stored(*map(creates, "abc")))
    assert store.stored == [["first"], ["a", "c"]]
    assert [job.job_id for job in results if isinstance(job, Job)] == ["first", "a", "c"]
    assert results[2] is exists


@pytest.mark.parametrize("failure", [DatabaseUnavailable("away"), RuntimeError("a bug")])
async def test_a_failed_store_fails_waiting_jobs_but_not_later_ones(failure: Exception) -> None:
    store = Store()
    store.failure = failure

    results = await store.while_one_is_stored(creates("a"), creates("b"))
    assert results == [failure] * 3
    store.failure = None
    assert (await store.queue.store(creates("c"))).job_id == "c"


class Exit(BaseException):
    """Ends a service."""


def test_the_end_of_the_service_cancels_all_waiting_jobs() -> None:
    store = Store()
    store.failure = Exit()

    async def story() -> None:
        results = await store.while_one_is_stored(creates("a"))
        assert [type(each) for each in results] == [asyncio.CancelledError] * 2
        store.failure = None
        assert (await store.queue.store(creates("b"))).job_id == "b"

    asyncio.run(asyncio.wait_for(story(), TIMEOUT_SECONDS))


async def test_a_client_that_leaves_does_not_affect_others() -> None:
    store = Store()

    leaving = asyncio.create_task(store.queue.store(creates("a")))
    await asyncio.to_thread(store.begun.wait, TIMEOUT_SECONDS)
    staying = asyncio.create_task(store.queue.store(creates("b")))
    await asyncio.sleep(0)
    leaving.cancel()
    store.released.set()
    assert (await staying).job_id == "b"
    assert store.stored == [["a"], ["b"]]


SNAPSHOT = {"command": ("python", "train.py"), "code": "snapshot", "world_size": 2}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hosts": ("here",)}, None),
        ({}, "code: ranks may run on other hosts"),
        ({"engine": "slurm"}, "code: ranks may run on other hosts"),
        ({"hosts": ("here",), "command": ("true",)}, "code: snapshot needs a script"),
        ({"hosts": ("here",), "command": ("sh", "-c", "python train.py")}, "code: snapshot needs"),
    ],
)
def test_a_snapshot_is_for_scripts_of_this_host(
    submitter: Submitter, tmp_path: Path, fields: dict[str, object], why: str | None
) -> None:
    (tmp_path / "train.py").touch()
    settings = msgspec.structs.replace(submitter.settings, engines=frozenset({"slurm"}))
    submitter = replace(
        submitter, read_cluster=lambda: Cluster(nodes=(HERE, BOX)), settings=settings
    )
    request = JobRequest(**{**SNAPSHOT, "python": sys.executable, **fields})
    if why is None:
        copy = tmp_path / "copy"
        assert submitter.prepare(request, copy).spec.command == ("python", f"{copy}/train.py")
    else:
        with pytest.raises(InvalidRequest, match=why):
            submitter.prepare(request)
