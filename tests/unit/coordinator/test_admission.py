from dataclasses import replace

import msgspec
import pytest

from coordinator.decide import placement
from coordinator.decide.admission import Claim, admit
from muster.cluster.description import Cluster, ClusterNode
from tests.support.stories import queued_job


def claims(*slots: int) -> list[Claim]:
    return [Claim(f"job{number}", count) for number, count in enumerate(slots)]


def reasons(waiting: list[Claim], holding: list[Claim], slots: int) -> list[str]:
    return [it for it in admit(waiting, holding, slots) if isinstance(it, str)]


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
    answers = list(admit(claims(*waiting), claims(used), slots))
    assert answers[:admitted] == [()] * admitted
    assert len(answers) == len(waiting)
    assert all(isinstance(it, str) for it in answers[admitted:]), "every other job gets a reason"


def test_admission_of_thousands_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def slots(_: Claim) -> int:
        nonlocal looks
        looks += 1
        return 1

    waiting = claims(*[1] * 3000)
    monkeypatch.setattr(Claim, "slots", property(slots))
    assert list(admit(waiting, [], 3000)) == [()] * 3000
    assert looks <= 5 * 3000


def test_every_waiting_job_gets_a_reason() -> None:
    assert reasons(claims(4, 2, 2, 1), claims(6), 8) == [
        "waits for 4 of 8 slots (MUSTER_SLOTS); 2 are free, job0 holds the others",
        "waits for 2 of 8 slots; 1 job is ahead of it",
        "waits for 2 of 8 slots; 2 jobs are ahead of it",
        "waits for 1 of 8 slots; 3 jobs are ahead of it",
    ]


def test_a_job_larger_than_all_slots_waits_for_an_empty_machine() -> None:
    (wait,) = reasons(claims(9), claims(1), 8)
    assert wait == (
        "needs 9 slots, more than the 8 there are (MUSTER_SLOTS): it starts when no other job runs"
    )


def test_overcommitted_slots_show_none_free() -> None:
    (wait,) = reasons(claims(2), claims(12), 8)
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
    (wait,) = reasons(claims(8), claims(*[1] * held), 8)
    assert wait.endswith(f"free, {said}")


def test_a_job_admitted_just_now_holds_slots() -> None:
    (wait,) = reasons(claims(2, 8), [], 8)
    assert wait == "waits for 8 of 8 slots (MUSTER_SLOTS); 6 are free, job0 holds the others"


def test_a_job_that_waits_for_a_host_to_be_corrected_holds_up_no_other() -> None:
    nodes = (ClusterNode(name="a", host="a", slots=2), ClusterNode(name="b", host="b", slots=2))
    anywhere = queued_job(hosts=("a", "b"), world_size=2)
    picky = replace(anywhere, spec=msgspec.structs.replace(anywhere.spec, hosts=("b",)))
    cluster = Cluster(nodes=nodes)
    waits, placed, full = placement.admit(
        [picky, anywhere, anywhere], [], cluster, {"b": "its disk is read-only"}
    )
    assert "only 0 of its 2 ranks fit now" in waits
    assert waits.endswith("; b: its disk is read-only")
    assert [it.host for it in placed] == ["a", "a"]
    assert "slots in use: 2 of 2" in full
