from dataclasses import replace

import msgspec
import pytest

from coordinator.decide import placement
from coordinator.decide.actions import PlaceRank
from coordinator.decide.state.job import JobSnapshot
from muster.cluster.description import Cluster, ClusterNode, cluster_of_service
from muster.cluster.placement import NodeUse
from muster.contracts.job.status import JobId
from tests.support.stories import queued_job

NODE = "n-0123456789ab"


def jobs(*slots: int) -> list[JobSnapshot]:
    return [
        replace(queued_job((NODE,), world_size=count), job_id=JobId(f"job{number}"))
        for number, count in enumerate(slots)
    ]


def answers(waiting: list[int], held: list[int], slots: int) -> list[list[PlaceRank] | str]:
    """Return what jobs of this many ranks are answered while others hold slots."""
    known = jobs(*held, *waiting)
    queue = known[len(held) :]
    return list(
        placement.admit(queue, known[: len(held)], cluster_of_service(None, NODE, slots), {}, 0.0)
    )


def reasons(waiting: list[int], held: list[int], slots: int) -> list[str]:
    return [it for it in answers(waiting, held, slots) if isinstance(it, str)]


@pytest.mark.parametrize(
    ("waiting", "used", "slots", "admitted"),
    [
        ([], 0, 8, 0),
        ([4], 0, 8, 1),
        ([4, 4], 0, 8, 2),
        ([4, 4, 1], 0, 8, 2),
        ([4], 4, 8, 1),
        ([5], 4, 8, 0),
        ([8], 1, 8, 0),
        ([8, 1], 1, 8, 0),  # no overtaking
        ([1, 8, 1], 0, 8, 1),
        ([9], 0, 8, 1),  # larger than all slots, but alone
        ([9, 1], 0, 8, 1),
        ([9], 1, 8, 0),
        ([1, 9], 0, 8, 1),
        ([1], 9, 8, 0),  # a job larger than all slots runs
        ([1], 8, 8, 0),
    ],
)
def test_jobs_are_admitted_in_order(
    waiting: list[int], used: int, slots: int, admitted: int
) -> None:
    found = answers(waiting, [used] if used else [], slots)
    assert found[:admitted] == [
        [PlaceRank(rank=rank, host=NODE) for rank in range(size)] for size in waiting[:admitted]
    ]
    assert len(found) == len(waiting)
    assert all(isinstance(it, str) for it in found[admitted:]), "every other job gets a reason"


@pytest.mark.slow
def test_admission_of_thousands_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    added, add = 0, NodeUse.add

    def count(*args: object) -> None:
        nonlocal added
        added += 1
        add(*args)

    monkeypatch.setattr(NodeUse, "add", count)
    assert not reasons([1] * 3000, [], 3000)
    assert added <= 5 * 3000


def test_every_waiting_job_gets_a_reason() -> None:
    assert reasons([4, 2, 2, 1], [6], 8) == [
        "waits for 4 of 8 slots (MUSTER_SLOTS); 2 are free, job0 holds the others",
        "waits for 2 of 8 slots; 1 job is ahead of it",
        "waits for 2 of 8 slots; 2 jobs are ahead of it",
        "waits for 1 of 8 slots; 3 jobs are ahead of it",
    ]


def test_a_job_larger_than_all_slots_waits_for_an_empty_machine() -> None:
    (wait,) = reasons([9], [1], 8)
    assert wait == (
        "needs 9 slots, more than the 8 there are (MUSTER_SLOTS): it starts when no other job runs"
    )


def test_overcommitted_slots_show_none_free() -> None:
    (wait,) = reasons([2], [12], 8)
    assert wait == ("waits for 2 of 8 slots (MUSTER_SLOTS); 0 are free, job0 holds the others")


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (2, "job0 and job1 hold the others"),
        (3, "job0, job1 and job2 hold the others"),
        (5, "job0, job1, job2 and 2 more hold the others"),
    ],
)
def test_a_waiting_job_names_the_holders(held: int, said: str) -> None:
    (wait,) = reasons([8], [1] * held, 8)
    assert wait.endswith(f"free, {said}")


def test_a_job_admitted_just_now_holds_slots() -> None:
    (wait,) = reasons([2, 8], [], 8)
    assert wait == "waits for 8 of 8 slots (MUSTER_SLOTS); 6 are free, job0 holds the others"


def test_what_only_the_machine_knows_is_not_asked_of_it() -> None:
    job = queued_job((NODE,), world_size=2, gpus_per_rank=1)
    (placed,) = placement.admit([job], [], cluster_of_service(None, NODE, 8), {}, 0.0)
    assert [it.host for it in placed] == [NODE, NODE]


def test_a_job_that_waits_for_a_host_to_be_corrected_holds_up_no_other() -> None:
    nodes = (ClusterNode(name="a", host="a", slots=2), ClusterNode(name="b", host="b", slots=2))
    anywhere = queued_job(hosts=("a", "b"), world_size=2)
    picky = replace(anywhere, spec=msgspec.structs.replace(anywhere.spec, hosts=("b",)))
    cluster = Cluster(nodes=nodes)
    waits, placed, full = placement.admit(
        [picky, anywhere, anywhere], [], cluster, {"b": "its disk is read-only"}, 0.0
    )
    assert "only 0 of its 2 ranks fit now" in waits
    assert waits.endswith("; b: its disk is read-only")
    assert [it.host for it in placed] == ["a", "a"]
    assert "slots in use: 2 of 2" in full
