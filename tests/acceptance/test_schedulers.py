"""What jobs may expect of every scheduler: a real Slurm, and a stand-in for Kubernetes."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.clusters import (
    ENDLESS,
    SIX_RANKS,
    ClusterInstallation,
    SchedulerUnderTest,
    lent_cluster,
    needs_cluster,
    scheduler_cluster,
    trains,
)
from tests.support.installation import Seen, await_value
from tests.support.kubernetes import Kubernetes, needs_kubernetes
from tests.support.slurm import Slurm, needs_slurm

pytestmark = [needs_cluster(), pytest.mark.timeout(300)]

Both = tuple[ClusterInstallation, SchedulerUnderTest]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(Slurm, id="slurm", marks=needs_slurm()),
        pytest.param(Kubernetes, id="kubernetes", marks=needs_kubernetes()),
    ],
)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    with scheduler_cluster(tmp_path_factory.mktemp("scheduler"), request.param) as both:
        yield both


@pytest.fixture
def installation(both: Both) -> Iterator[ClusterInstallation]:
    yield from lent_cluster(*both)


@pytest.fixture
def scheduler(both: Both) -> SchedulerUnderTest:
    return both[1]


def test_a_job_trains_there_as_it_does_here(
    installation: ClusterInstallation, scheduler: SchedulerUnderTest
) -> None:
    job_id = installation.submit(**SIX_RANKS, **scheduler.fields)
    installation.complete(job_id)
    here = installation.submit(**{**SIX_RANKS, "world_size": 2}, engine="local")
    installation.complete(here)
    assert installation.last_digest(job_id) == installation.last_digest(here)


def test_a_coordinator_finds_the_jobs_of_its_predecessor(
    installation: ClusterInstallation, scheduler: SchedulerUnderTest
) -> None:
    job_id = installation.submit(**ENDLESS, **scheduler.fields)
    seen = installation.wait_until(job_id, trains(10))
    jobs = scheduler.jobs()
    assert len(jobs) == 3
    installation.restart_coordinator(signal.SIGKILL)
    later = installation.wait_until(job_id, trains(seen["step"] + 50))
    assert scheduler.jobs() == jobs
    assert [it["restarts"] for it in later["workers"]] == [0] * 6


def test_a_job_that_is_taken_away_is_replaced(
    installation: ClusterInstallation, scheduler: SchedulerUnderTest
) -> None:
    job_id = installation.submit(**ENDLESS, **scheduler.fields)
    installation.wait_until(job_id, trains(10))
    scheduler.take_away(next(it for it in scheduler.jobs() if it.endswith("-2-a1")))
    await_value(
        lambda: any(it.endswith("-2-a2") for it in scheduler.jobs()),
        lambda: installation.describe(job_id),
    )
    step = installation.see(job_id)["step"]
    installation.wait_until(job_id, trains(step + 50))
    events = installation.events(job_id)
    lost = [it for it in events if it["kind"] in {"agent_lost", "host_lost"}]
    assert len(lost) == 1, events
    # A scheduler that answers after the host's 10 s of silence says it too late.
    assert lost[0]["kind"] == "host_lost" or scheduler.taken_away in lost[0]["message"]


def test_a_job_in_the_queue_says_why(
    installation: ClusterInstallation, scheduler: SchedulerUnderTest
) -> None:
    scheduler.hold(is_held=True)
    job_id = installation.submit(**SIX_RANKS, **scheduler.fields)
    seen = installation.wait_until(job_id, lambda it: it["reason"] == "waiting_for_slots")
    assert scheduler.held in seen["message"]
    scheduler.hold(is_held=False)
    installation.complete(job_id)


def test_a_refusal_fails_the_job_with_its_words(
    installation: ClusterInstallation, scheduler: SchedulerUnderTest
) -> None:
    options, words = scheduler.refused
    fields = {**SIX_RANKS, **scheduler.fields, "engine_options": options}
    seen = installation.fail(installation.submit(**fields))
    assert (seen["reason"], words in seen["message"]) == ("engine_refused", True), seen["message"]


def test_training_goes_on_while_the_scheduler_is_away(
    installation: ClusterInstallation, scheduler: SchedulerUnderTest
) -> None:
    job_id = installation.submit(**ENDLESS, **scheduler.fields)
    seen = installation.wait_until(job_id, trains(10))
    jobs = scheduler.jobs()
    with scheduler.is_away():
        installation.restart_coordinator(signal.SIGKILL)
        seen = installation.wait_until(job_id, trains(seen["step"] + 100))
    later = installation.wait_until(job_id, trains(seen["step"] + 100))
    assert [it["restarts"] for it in later["workers"]] == [0] * 6
    assert scheduler.jobs() == jobs


def test_a_killed_agent_leaves_nothing_and_is_replaced(
    installation: ClusterInstallation, scheduler: SchedulerUnderTest
) -> None:
    job_id = installation.submit(**ENDLESS, **scheduler.fields)
    installation.wait_until(job_id, trains(10))
    jobs = scheduler.jobs()
    agent = next(pid for pid, tag in installation.all_tags().items() if tag == "agent")
    os.kill(agent, signal.SIGKILL)
    await_value(
        lambda: any(it.endswith("-a2") for it in scheduler.jobs()),
        lambda: installation.describe(job_id),
    )
    step = installation.see(job_id)["step"]
    installation.wait_until(job_id, trains(step + 100))
    assert len(scheduler.jobs().keys() & jobs.keys()) == 2


def test_engines_say_what_is_missing(
    installation: ClusterInstallation, scheduler: SchedulerUnderTest
) -> None:
    def said() -> dict[str, Seen]:
        answer = installation.request("GET", "/engines").json()
        return {it["engine"]: it for it in answer["engines"]}

    installation.restart_coordinator(signal.SIGTERM)  # it asks at once, after whatever came before
    await_value(
        lambda: said()[scheduler.name]["seen_at"] and not said()[scheduler.name]["problem"],
        lambda: f"{said()}",
    )
    (other,) = {"slurm", "kubernetes"} - {scheduler.name}
    assert {name: it["problem"] for name, it in said().items()} == {
        "local": None,
        "ssh": None,
        scheduler.name: None,
        other: f"add {other} to MUSTER_ENGINES of the services",
        "mesh": "add mesh to MUSTER_ENGINES of the services",
    }
