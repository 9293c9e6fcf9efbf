"""Who is told which layout, with which memory; heard by what ranks hear with."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
from scarcity import no_descriptors

from muster.contracts.messages import Announce, Layout, Seat
from muster.line import Line
from muster.synchronous.layouts import AnnouncedLayouts, Gathering
from worker.assembly import Assembly
from worker.child import Child


class Pupil(Child):
    """A child with a channel, and no process behind it."""

    def __init__(self, rank: int, incarnation: int = 0) -> None:
        self.rank = rank
        self.incarnation = incarnation
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        self.channel, self.theirs = socket.socketpair(socket.AF_UNIX, kind)
        self.stops = False
        self.line = Line(os.dup(self.theirs.fileno()))
        self.ear = AnnouncedLayouts(self.line, lambda: self.stops)
        self._heard: list[Gathering] = []

    def hears(self) -> Gathering:
        self._heard.append(self.ear.next())
        return self._heard[-1]

    def calls_again(self) -> None:
        """Give up its line, with what was still on its way, and take another."""
        self._hangs_up()
        again = Pupil(self.rank)
        self.channel, self.theirs, self.line = again.channel, again.theirs, again.line
        self.ear = again.ear

    def goes_home(self) -> None:
        self._hangs_up()
        for gathering in self._heard:
            gathering.close()
        if "arena" in vars(self):
            os.close(self.arena)

    def _hangs_up(self) -> None:
        for end in (self.line, self.channel, self.theirs):
            end.close()

    def hears_nothing(self) -> bool:
        try:
            self.theirs.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        return False

    def is_full(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.channel.send(b"chatter")

    def is_emptied(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.theirs.recv(100)


class School:
    """What an assembly needs of a nursery."""

    def __init__(self, ranks: int) -> None:
        self.living = [Pupil(rank) for rank in range(ranks)]

    def find(self, rank: int, incarnation: int) -> Pupil | None:
        known = {(one.rank, one.incarnation): one for one in self.living}
        return known.get((rank, incarnation))


@pytest.fixture
def school() -> Iterator[School]:
    school = School(3)
    everybody = list(school.living)
    yield school
    for pupil in everybody:
        pupil.goes_home()


@pytest.fixture
def assembly(school: School) -> Iterator[Assembly]:
    assembly = Assembly(school)
    yield assembly
    # Nobody is left to be told of another layout, and the memory of the one before is given up.
    school.living = []
    assembly.announce(order(100))


def order(generation: int, *ranks: int, incarnations: Sequence[int] | None = None) -> Announce:
    seats = tuple(Seat(worker_id=rank, rank=rank, host="", port=0) for rank in ranks)
    layout = Layout(generation=generation, token="", seats=seats, paused=False)
    return Announce(layout=layout, incarnations=tuple(incarnations or [0] * len(ranks)))


def same(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


def test_every_member_hears_the_layout_and_gets_everybodys_memory_in_order(
    school: School, assembly: Assembly
) -> None:
    assembly.announce(order(1, 0, 1, 2))
    heard = [pupil.hears() for pupil in school.living]
    assert [one.layout.generation for one in heard] == [1, 1, 1]
    for one in heard:
        assert same(one.memory[0], heard[0].memory[0]), "one result for all"
        for pupil, arena in zip(school.living, one.memory[1:], strict=True):
            assert same(arena, pupil.arena)


def test_the_result_is_new_with_each_layout_and_an_arena_is_not(
    school: School, assembly: Assembly
) -> None:
    assembly.announce(order(1, 0, 1, 2))
    first = school.living[0].hears()
    assembly.announce(order(2, 0, 1, 2))
    second = school.living[0].hears()
    assert not same(first.memory[0], second.memory[0])
    assert same(first.memory[1], second.memory[1])


def test_who_is_no_member_hears_of_it_and_gets_no_memory(
    school: School, assembly: Assembly
) -> None:
    assembly.announce(order(1, 0, 2))
    heard = school.living[1].hears()
    assert [seat.rank for seat in heard.layout.seats] == [0, 2]
    assert heard.memory == ()


@pytest.mark.parametrize("generation", [0, 1])
def test_an_order_that_is_not_newer_is_ignored(
    school: School, assembly: Assembly, generation: int
) -> None:
    assembly.announce(order(1, 0, 1, 2))
    for pupil in school.living:
        pupil.hears()
    assembly.announce(order(generation, 0))
    assert all(pupil.hears_nothing() for pupil in school.living)


@pytest.mark.parametrize("incarnations", [[0, 1], [1, 0]])
def test_a_layout_with_a_process_that_is_not_there_is_told_to_nobody(
    school: School, assembly: Assembly, incarnations: list[int]
) -> None:
    assembly.announce(order(1, 0, 1, incarnations=incarnations))
    assembly.deliver()
    assert all(pupil.hears_nothing() for pupil in school.living)


def test_whoever_does_not_listen_is_told_as_soon_as_it_does(
    school: School, assembly: Assembly
) -> None:
    deaf = school.living[1]
    deaf.is_full()
    assembly.announce(order(1, 0, 1))
    school.living[0].hears()
    deaf.is_emptied()
    assembly.deliver()
    deaf.hears()
    school.living[2].hears()
    assembly.deliver()
    assert all(pupil.hears_nothing() for pupil in school.living), "everybody once"


def test_whoever_died_while_it_did_not_listen_keeps_nobody_waiting(
    school: School, assembly: Assembly
) -> None:
    deaf = school.living[1]
    deaf.is_full()
    assembly.announce(order(1, 0, 1))
    del school.living[1]
    assembly.deliver()
    school.living[0].hears()
    assembly.announce(order(2, 0))
    assert school.living[0].hears().layout.generation == 2


def test_a_closed_channel_has_nobody_behind_it(school: School, assembly: Assembly) -> None:
    school.living[1].theirs.close()
    school.living[1].line.close()
    assembly.announce(order(1, 0, 1, 2))
    assert school.living[2].hears().layout.generation == 1


def test_a_rank_that_calls_again_is_told_again(school: School, assembly: Assembly) -> None:
    """Nobody knows what was still on its way when the line broke; what it knows it ignores."""
    pupil, *others = school.living
    assembly.announce(order(1, 0, 1))
    pupil.calls_again()
    assembly.deliver()
    assert pupil.hears().layout.generation == 1
    for other in others:
        other.hears()
        assert other.hears_nothing()


def test_a_rank_that_has_not_called_yet_is_told_when_it_does(
    school: School, assembly: Assembly
) -> None:
    pupil = school.living[0]
    channel, pupil.channel = pupil.channel, None
    assembly.announce(order(1, 0, 1))
    assembly.deliver()
    assert pupil.hears_nothing()
    pupil.channel = channel
    assembly.deliver()
    pupil.hears()


@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_a_layout_that_there_is_no_memory_for_is_told_to_nobody_before_there_is(
    school: School, assembly: Assembly, spare: int
) -> None:
    """One result and three arenas are to be made, and any of them may be what fails."""
    with no_descriptors(but=spare):
        assembly.announce(order(1, 0, 1, 2))
        assembly.deliver()
    assert all(pupil.hears_nothing() for pupil in school.living)
    assembly.deliver()
    heard = [pupil.hears() for pupil in school.living]
    assert [len(one.memory) for one in heard] == [4, 4, 4]
    for one in heard:
        assert same(one.memory[0], heard[0].memory[0])
    assembly.deliver()
    assert all(pupil.hears_nothing() for pupil in school.living), "everybody once"


def test_a_layout_that_there_never_was_memory_for_gives_way_to_the_next(
    school: School, assembly: Assembly
) -> None:
    with no_descriptors():
        assembly.announce(order(1, 0, 1, 2))
        assembly.announce(order(2, 0, 1))
    assembly.deliver()
    for pupil in school.living:
        heard = pupil.hears()
        assert heard.layout.generation == 2
        assert pupil.hears_nothing()
