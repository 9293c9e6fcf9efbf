"""Groups form among scripts that start, find each other and die at any moment."""

import pytest

from muster.mesh.forming import (
    REACH_SECONDS,
    SETTLE_SECONDS,
    Agree,
    Forming,
    Full,
    Propose,
    State,
)
from tests.support.gatherings import WITHOUT, History, faults, faults_anew

HISTORIES = 300


@pytest.mark.slow
def test_one_group_lives_after_every_history() -> None:
    assert {seed: found for seed in range(HISTORIES) if (found := faults(seed))} == {}


@pytest.mark.slow
def test_survivors_meet_again_with_those_who_wait() -> None:
    assert {seed: found for seed in range(HISTORIES) if (found := faults_anew(seed))} == {}


@pytest.mark.parametrize(("make", "history"), WITHOUT.items())
def test_every_rule_is_needed(make: type[Forming], history: History) -> None:
    play, seed = history
    assert play(seed, make)
    assert not play(seed, Forming)


def test_a_member_of_an_earlier_group_hears_that_one_lives() -> None:
    script = Forming("b", None, lambda: b"", 0.0, awaited=["c"])
    script.meet("c", 1.0, is_after=True)
    script.check(1.0 + SETTLE_SECONDS)
    assert script.state is State.PROPOSING
    script.receive("c", Full(members=("a", "c")), 2.0)
    script.check(2.0)
    assert script.full == ("a", "c")
    assert script.state is State.GATHERING


def test_one_that_waits_goes_first_once_the_group_that_lived_is_over() -> None:
    script = Forming("a", None, lambda: b"", 0.0)
    for member in "b", "c", "d":
        script.meet(member, 0.0, is_after=True)
        script.receive(member, Full(members=("b", "c", "d")), 0.0)
    script.meet("b", 1.0, is_after=True)  # it has lost the others
    script.meet("c", 1.0, is_after=True)
    script.receive("d", Full(members=("b", "c", "d")), 1.0)  # which has not noticed yet
    script.check(2.0 + SETTLE_SECONDS)
    assert script.state is State.GATHERING
    script.lose("d", 3.0)  # and never does
    script.check(3.0 + SETTLE_SECONDS)
    assert script.state is State.PROPOSING


def test_a_proposer_that_is_in_a_group_holds_no_promise() -> None:
    script = Forming("b", 3, lambda: b"", 0.0)
    script.meet("a", 0.0)
    script.receive("a", Propose(number=1), 0.0)
    script.check(0.0)
    assert script.state is State.AGREED
    script.receive("a", Full(members=("a", "c", "d")), 0.0)
    script.meet("a", 1.0, is_after=True)
    script.receive("a", Propose(number=1), 1.0)
    script.check(1.0)
    assert script.due[-1] == ("a", Agree(number=1))


def test_a_proposal_is_answered_once_a_lower_name_is_gone() -> None:
    script = Forming("c", 2, lambda: b"", 0.0)
    script.meet("b", 0.0)
    script.mention("a", 0.0)
    script.receive("b", Propose(number=1), 0.0)
    script.check(0.0)
    assert script.state is State.GATHERING
    script.check(REACH_SECONDS)
    assert script.state is State.AGREED


def test_a_late_promise_to_a_round_given_up_counts_for_no_other() -> None:
    script = Forming("a", 2, lambda: b"", 0.0)
    script.meet("b", 0.0)
    script.check(SETTLE_SECONDS)
    script.lose("b", 2.0, is_renewed=True)
    script.meet("b", 2.0)
    script.check(2.0 + SETTLE_SECONDS)
    script.receive("b", Agree(number=1), 4.0)
    assert script.state is State.PROPOSING
    script.receive("b", Agree(number=2), 4.0)
    assert script.state is State.CLOSED
