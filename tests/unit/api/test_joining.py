"""Machines of a cluster that ask to join a job: who is refused, and what is recorded."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from api.access.auth import Caller
from api.dependencies import AppState
from api.errors import Problem
from api.routes.pool import request_join
from api.schema import JoinRequest
from database.engine import Database
from database.errors import JobChanged, JobMissing, JobOver, PoolFull
from database.fenced_writer import FencedWriter
from database.history import History
from database.jobs import Jobs
from database.records import Job
from muster.cluster.description import Cluster, ClusterNode, Gpu, cluster_of_service
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, StopRequest
from muster.contracts.token import Scope
from tests.support.database_samples import (
    bring_to,
    member,
    nothing_moves,
    submit,
    take_lease,
    worker,
    write_of,
)

CLUSTER = Cluster(
    nodes=(
        ClusterNode(name="home", host="localhost", slots=4, max_adapters=2),
        ClusterNode(name="small", host="10.0.0.2", transport="ssh", slots=1, max_adapters=2),
        ClusterNode(
            name="gpu-box",
            host="10.0.0.3",
            transport="ssh",
            slots=4,
            gpus=(Gpu(uuid="GPU-1", type="RTX 4090", vram_mb=24564),),
        ),
    )
)
TWO = JobSpec(mode="synchronous", world_size=2, max_workers=4)


class Service:
    """What the route uses, over a database of its own."""

    def __init__(self, database: Database, cluster: Cluster = CLUSTER) -> None:
        self.database = database
        self.jobs, self.history = Jobs(database), History(database)
        self.cluster = cluster
        self.wakes = 0

    def starts(self, job_id: str, spec: JobSpec, *hosts: str) -> Job:
        """Return a running job whose ranks are on these hosts."""
        job = submit(self.jobs, job_id, spec=spec)
        job = bring_to(self.database, job, JobStatus.STARTING, JobStatus.RUNNING)
        members = [member(number) for number, _ in enumerate(hosts)]
        self.run(job, *hosts, members=members)
        return self.jobs.get(job.job_id)

    def run(self, job: Job, *hosts: str, down: int = 0, **rows: Any) -> None:  # noqa: ANN401
        """Let the job's ranks run on these hosts, but the first ones, which wait to restart."""
        ranks = [
            worker(rank, host=host, **({"state": "exited", "process": None} if rank < down else {}))
            for rank, host in enumerate(hosts)
        ]
        writer = FencedWriter(self.database, take_lease(self.database))
        writer.commit([write_of(job, ranks=ranks, **rows)])

    def join(self, node: str, job_id: str = "a", **asking: Any) -> Job:  # noqa: ANN401
        if_match = asking.pop("if_match", None)
        state = SimpleNamespace(
            jobs=self.jobs,
            history=self.history,
            submitter=SimpleNamespace(cluster=self.cluster),
            host_named=lambda name: name,
            coordinator=SimpleNamespace(wake=self._wake),
        )
        request_join(
            JobId(job_id),
            cast(AppState, state),
            Caller(name="token:ci", scope=Scope.SUBMIT, is_limited=True),
            JoinRequest(node=node, **asking),
            if_match,
        )
        return self.jobs.get(JobId(job_id))

    def _wake(self) -> None:
        self.wakes += 1


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with tables; copying it is faster than creating them."""
    path = tmp_path_factory.mktemp("database") / "template.db"
    Database.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def service(tmp_path: Path, template: Path) -> Iterator[Service]:
    shutil.copy(template, tmp_path / "muster.db")
    database = Database.open(f"sqlite:///{tmp_path}/muster.db")
    yield Service(database)
    database.close()


def test_a_machine_that_joins_gets_one_rank_more(service: Service) -> None:
    service.starts("a", TWO, "home", "home")
    job = service.join("gpu-box", gpu_count=1, backend="cuda", epoch=3)
    assert (job.world_size, job.wanted_hosts, service.wakes) == (3, {"gpu-box": 1}, 1)
    *_, event = service.history.events(job.job_id, 9)
    assert (event.kind, event.actor) == ("join_requested", "token:ci")
    assert event.message == "gpu-box asked to join (cuda, GPUs: 1, epoch: 3)"


def test_ranks_that_run_there_or_are_about_to_are_counted(service: Service) -> None:
    service.starts("a", TWO, "home", "home")
    assert service.join("home").wanted_hosts == {"home": 3}
    assert service.join("home").wanted_hosts == {"home": 4}


def test_ranks_that_wait_to_restart_are_counted(service: Service) -> None:
    job = service.starts("a", TWO, "home", "home")
    service.run(job, "home", "home", down=1)
    assert service.join("home").wanted_hosts == {"home": 3}
    other = service.starts("b", TWO, "small", "home")
    service.run(other, "small", "home", down=1)
    with pytest.raises(Problem, match="small cannot run another rank"):
        service.join("small")


def test_a_machine_that_was_lost_may_join_again(service: Service) -> None:
    service.starts("a", TWO, "home", "home")
    service.run(service.join("small"), "home", "home", "home")
    assert service.join("small").wanted_hosts == {"small": 1}


@pytest.mark.parametrize("shrink", ["scale", "leave"])
def test_shrinking_forgets_who_asked_to_join(service: Service, shrink: str) -> None:
    job = service.starts("a", TWO, "home", "home")
    service.join("small")
    if shrink == "scale":
        assert service.jobs.scale(job.job_id, 2).wanted_hosts == {}
    else:
        assert service.history.request_departure(job.job_id, 0).wanted_hosts == {}


REFUSED: dict[str, tuple[str, dict[str, Any], int, str, str]] = {
    "unknown node": ("b-52", {}, 404, "node-not-found", "use one of home, small, gpu-box"),
    "independent": ("home", {"job_id": "alone"}, 409, "keeps-its-world-size", "independent"),
    "no free slot": ("small", {}, 409, "node-unsuitable", "slots in use: 1 of 1"),
    "another job has it": ("gpu-box", {}, 409, "node-unsuitable", "jobs there: 1 of 1"),
    "no GPU offered": ("gpu-box", {"job_id": "gpu"}, 409, "node-unsuitable", "needs 1"),
    "GPU without CUDA": (
        "gpu-box",
        {"job_id": "gpu", "gpu_count": 1},
        409,
        "node-unsuitable",
        "offers 0 GPUs for CUDA",
    ),
    "no GPU there": (
        "home",
        {"job_id": "gpu", "gpu_count": 1, "backend": "cuda"},
        409,
        "node-unsuitable",
        "it has no GPU",
    ),
    "changed since": ("home", {"if_match": '"other"'}, 412, "", "has changed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_a_machine_that_cannot_run_the_rank_is_refused(
    service: Service, case: tuple[str, dict[str, Any], int, str, str]
) -> None:
    node, asking, status, slug, why = case
    service.starts("a", TWO, "home", "small")
    service.starts("gpu", msgspec.structs.replace(TWO, vram_mb=8000), "gpu-box", "gpu-box")
    service.starts("alone", JobSpec(mode="independent", world_size=2))
    kind = Problem if slug else (JobMissing, JobOver, PoolFull, JobChanged)
    with nothing_moves(service.database), pytest.raises(kind, match=why) as refused:
        service.join(node, **asking)
    if isinstance(refused.value, Problem):
        assert (refused.value.status, refused.value.slug) == (status, slug)
    assert service.wakes == 0


def test_without_a_cluster_file_no_host_can_join(service: Service) -> None:
    service.starts("a", TWO, "home", "home")
    service.cluster = cluster_of_service(None, "home", slots=4)
    with nothing_moves(service.database), pytest.raises(Problem, match="MUSTER_CLUSTER") as refused:
        service.join("home")
    assert refused.value.status == 404


@pytest.mark.parametrize("case", ["full", "stopping", "over", "unknown"])
def test_a_job_that_takes_no_worker_refuses(service: Service, case: str) -> None:
    job = service.starts("a", msgspec.structs.replace(TWO, max_workers=2), "home", "home")
    errors = {"full": PoolFull, "stopping": JobOver, "over": JobOver, "unknown": JobMissing}
    if case == "stopping":
        service.jobs.request_stop(job.job_id, StopRequest.GRACEFUL, None)
    if case == "over":
        bring_to(service.database, job, JobStatus.COMPLETED)
    with nothing_moves(service.database), pytest.raises(errors[case]):
        service.join("home", "b" if case == "unknown" else "a")
