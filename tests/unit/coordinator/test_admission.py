import pytest

from coordinator.admission import admit


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
        ([8, 1], 1, 8, 0),  # nobody overtakes
        ([1, 8, 1], 0, 8, 1),
        ([9], 0, 8, 1),  # larger than all slots, but alone
        ([9, 1], 0, 8, 1),
        ([9], 1, 8, 0),
        ([1, 9], 0, 8, 1),
        ([1], 9, 8, 0),  # a giant runs
        ([1], 8, 8, 0),
    ],
)
def test_jobs_are_let_in_by_turn(waiting: list[int], used: int, slots: int, admitted: int) -> None:
    count, waits = admit(waiting, used=used, slots=slots)
    assert count == admitted
    assert len(waits) == len(waiting) - admitted, "each of the others is told why it waits"


def test_each_that_waits_is_told_why() -> None:
    _, waits = admit([4, 2, 2, 1], used=6, slots=8)
    assert [wait.message for wait in waits] == [
        "waits for 4 of 8 slots; 2 are free",
        "waits for 2 of 8 slots; 1 job is ahead of it",
        "waits for 2 of 8 slots; 2 jobs are ahead of it",
        "waits for 1 of 8 slots; 3 jobs are ahead of it",
    ]


def test_a_job_larger_than_all_slots_is_told_when_it_runs() -> None:
    _, (wait,) = admit([9], used=1, slots=8)
    assert wait.message == (
        "needs 9 slots, more than the 8 there are: it starts when no other job runs"
    )


def test_less_than_nothing_is_never_free() -> None:
    _, (wait,) = admit([2], used=12, slots=8)
    assert wait.message == "waits for 2 of 8 slots; 0 are free"
