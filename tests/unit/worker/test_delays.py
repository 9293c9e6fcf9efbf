"""Ends that wait, by a clock of their own."""

import pytest
from scarcity import no_descriptors

from worker.delays import BLIND_SECONDS, CONTAINMENT_SECONDS, Delays


class Wait:
    """The end of one rank that waits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.delays = Delays(lambda: self.seconds)

    def goes_on(self, seconds: float) -> None:
        self.seconds += seconds

    @property
    def is_held(self) -> bool:
        return self.delays.holds(0)

    @property
    def is_over(self) -> bool:
        return not self.is_held and self.delays.is_over(0)


@pytest.fixture
def wait() -> Wait:
    return Wait()


def test_who_can_look_waits_for_nothing_but_what_hangs(wait: Wait) -> None:
    assert not wait.is_held
    assert not wait.is_over
    wait.goes_on(CONTAINMENT_SECONDS)
    assert wait.is_over


def test_time_without_a_look_is_no_proof_that_something_hangs(wait: Wait) -> None:
    assert not wait.is_over
    wait.goes_on(CONTAINMENT_SECONDS / 2)
    with no_descriptors():
        assert wait.is_held
        wait.goes_on(CONTAINMENT_SECONDS)
        assert wait.is_held
    assert not wait.is_over
    wait.goes_on(CONTAINMENT_SECONDS)
    assert wait.is_over


def test_the_blind_do_not_wait_for_ever(wait: Wait) -> None:
    with no_descriptors():
        assert wait.is_held
        wait.goes_on(BLIND_SECONDS)
        assert not wait.is_held
        assert not wait.is_over, "the dead before it may have left a descriptor"
        wait.goes_on(CONTAINMENT_SECONDS)
        assert wait.is_over


def test_the_next_incarnation_begins_anew(wait: Wait) -> None:
    assert not wait.is_held
    wait.goes_on(BLIND_SECONDS)
    wait.delays.forget(0)
    with no_descriptors():
        assert wait.is_held
