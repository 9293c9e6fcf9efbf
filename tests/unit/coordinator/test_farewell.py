"""How long a coordinator that was told to end waits for its database."""

from coordinator.farewell import Farewell


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_waits_from_when_it_was_told_or_from_when_the_database_went() -> None:
    clock = Clock()
    farewell = Farewell(clock, patience_seconds=5.0)
    assert not farewell.has_waited_long_enough(since=0.0), "nobody has told it anything"
    farewell.leave()
    clock.now = 104.0
    assert not farewell.has_waited_long_enough(since=0.0)
    clock.now = 105.0
    assert farewell.has_waited_long_enough(since=0.0)
    assert not farewell.has_waited_long_enough(since=103.0)


def test_who_tells_it_again_and_again_does_not_make_it_wait_longer() -> None:
    clock = Clock()
    farewell = Farewell(clock, patience_seconds=5.0)
    for told in (100.0, 104.0, 108.0):
        clock.now = told
        farewell.drain()
    assert farewell.is_draining
    assert farewell.has_waited_long_enough(since=0.0)
