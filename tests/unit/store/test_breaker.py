"""While the database keeps people waiting in vain, one waits and the others are told at once."""

import threading
from collections.abc import Callable

import pytest

from store.breaker import LONG_SECONDS, Breaker
from store.errors import CommitInDoubt, JobMissing, StoreLocked, StoreUnavailable


class Door:
    """A breaker, the clock it looks at, and attempts that take as long as they are told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.breaker = Breaker(lambda: self.now)

    def fails(
        self,
        after_seconds: float = LONG_SECONDS,
        error: type[StoreUnavailable] = StoreLocked,
    ) -> None:
        with pytest.raises(error, match="hangs"), self.breaker.attempt():
            self._hang(after_seconds, error)

    def is_closed_to_others(self) -> bool:
        """Whether somebody who comes while another one tries is turned away."""
        with self.breaker.attempt():
            return not _in_another_thread(self._enters)

    def _enters(self) -> bool:
        try:
            with self.breaker.attempt():
                return True
        except StoreLocked as error:
            return str(error) != "it hangs"

    def _hang(self, seconds: float, error: type[StoreUnavailable]) -> None:
        self.now += seconds
        raise error("it hangs")


def test_as_long_as_it_answers_nobody_is_turned_away() -> None:
    assert not Door().is_closed_to_others()


def test_after_a_long_failure_only_one_tries_and_a_success_lets_all_in() -> None:
    door = Door()
    door.fails()
    assert door.is_closed_to_others()
    assert not door.is_closed_to_others()


def test_a_quick_failure_turns_nobody_away() -> None:
    door = Door()
    door.fails(after_seconds=0.0)
    assert not door.is_closed_to_others()


def test_a_quick_failure_after_a_long_one_is_no_answer() -> None:
    door = Door()
    door.fails()
    door.fails(after_seconds=0.0)
    assert door.is_closed_to_others()


def test_a_refusal_is_an_answer() -> None:
    door = Door()
    door.fails()
    with pytest.raises(JobMissing), door.breaker.attempt():
        raise JobMissing("a")
    assert not door.is_closed_to_others()


def _in_another_thread(work: Callable[[], bool]) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_who_is_turned_away_is_in_no_doubt_of_what_was_never_begun() -> None:
    door = Door()
    door.fails(error=CommitInDoubt)
    told: list[type[Exception]] = []

    def enters() -> bool:
        with pytest.raises(StoreUnavailable) as caught, door.breaker.attempt():
            pass
        told.append(caught.type)
        return False

    with door.breaker.attempt():
        _in_another_thread(enters)
    assert told == [StoreUnavailable]
