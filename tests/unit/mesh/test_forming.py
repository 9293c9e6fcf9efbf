"""Groups form among scripts that start, find each other and die at any moment."""

import pytest

from muster.mesh.forming import SETTLE_SECONDS, Forming, Full, State
from tests.support.gatherings import WITHOUT, faults, faults_anew

HISTORIES = 300


def test_one_group_lives_after_every_history() -> None:
    assert {seed: found for seed in range(HISTORIES) if (found := faults(seed))} == {}


def test_survivors_meet_again_with_those_who_wait() -> None:
    assert {seed: found for seed in range(HISTORIES) if (found := faults_anew(seed))} == {}


@pytest.mark.parametrize(("make", "seed"), WITHOUT.items())
def test_every_rule_is_needed(make: type[Forming], seed: int) -> None:
    assert faults(seed, make)
    assert not faults(seed)


def test_a_member_of_an_earlier_group_hears_from_members_that_one_lives() -> None:
    script = Forming("b", None, lambda: b"", 0.0, awaited=["c"])
    script.meet("newcomer", 0.0)
    script.receive("newcomer", Full(members=("a", "c")), 0.0)
    script.meet("c", 1.0, is_after=True)
    script.check(1.0 + SETTLE_SECONDS)
    assert script.state is State.PROPOSING
    script.receive("c", Full(members=("a", "c")), 2.0)
    assert script.full == ("a", "c")


def test_one_that_waits_goes_first_once_the_group_that_lived_is_over() -> None:
    script = Forming("a", None, lambda: b"", 0.0)
    for member in "b", "c":
        script.meet(member, 0.0, is_after=True)
        script.receive(member, Full(members=("b", "c")), 0.0)
    script.meet("b", 1.0, is_after=True)  # it has lost the other one
    script.receive("c", Full(members=("b", "c")), 1.0)  # which has not noticed yet
    script.check(2.0 + SETTLE_SECONDS)
    assert script.state is State.GATHERING
    script.meet("c", 3.0, is_after=True)
    script.check(3.0 + SETTLE_SECONDS)
    assert script.state is State.PROPOSING
