"""What an agent hears of its ranks, how much at once, and by which way."""

import selectors
import signal
import socket
from collections.abc import Iterator
from math import ceil
from pathlib import Path

import pytest
from house import LAST_CALL, PATIENCE_SECONDS, SAY_HELLO, WAIT, House
from installation import await_value
from stories import beat, saved

from muster.contracts.encoding import encode
from muster.contracts.messages import Hello, Orphaned, RankExited, RankMessage, RankSaid, Warned
from worker.adopted import Departed
from worker.child import PACKET_BYTES, PACKETS_LIMIT, Child
from worker.hearing import Hearing
from worker.logbook import LateLogbook


def test_whoever_speaks_and_ends_at_the_same_moment_is_heard_once(house: House) -> None:
    house.starts(SAY_HELLO)
    (listening,) = house.selector.get_map().values()
    house.lives_until_it_is_empty()
    before = list(house.reports)
    listening.data()  # as a loop does that had both on its list
    assert house.reports == before


FLOOD = (
    "import os; os.set_blocking(CHANNEL, True); said = {said!r}\n"
    "while True: os.write(CHANNEL, said)"
)
LARGEST = Orphaned(by="x" * 65000)


@pytest.mark.parametrize(
    ("word", "share"),
    [
        (beat(step=1), PACKETS_LIMIT),
        (saved(1), PACKETS_LIMIT),
        (LARGEST, ceil(PACKETS_LIMIT * PACKET_BYTES / len(encode(LARGEST)))),
    ],
)
def test_a_rank_that_floods_its_channel_has_its_share_of_a_tick(
    house: House, word: RankMessage, share: int
) -> None:
    house.starts(FLOOD.format(said=encode(word)), rank=0)
    house.starts(SAY_HELLO + WAIT, rank=1)

    def said_by(rank: int) -> int:
        reports = [report for report in house.reports if isinstance(report, RankSaid)]
        return sum(report.rank == rank for report in reports)

    for ticks in (1, 2, 3):
        while said_by(0) < ticks * share or not said_by(1):
            for key, _ in house.selector.select(PATIENCE_SECONDS):
                key.data()
        assert (said_by(0), said_by(1)) == (ticks * share, 1)
        assert len(house.selector.get_map()) == 1, "only the other one is listened to"
        house.nursery.listen_again()


def test_what_a_rank_said_beyond_its_share_is_heard_when_it_has_ended(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.child.PACKETS_LIMIT", 3)
    told = [beat(step=step) for step in range(50)]
    house.starts(f"import os; [os.write(CHANNEL, said) for said in {[*map(encode, told)]!r}]")
    for key, _ in house.selector.select(PATIENCE_SECONDS):
        key.data()
    while house.nursery:  # no further tick
        house.nursery.settle()
    said = [report.message for report in house.reports if isinstance(report, RankSaid)]
    assert said == told
    assert isinstance(house.reports[-1], RankExited)


def test_a_program_may_write_what_it_likes_into_its_channel(house: House) -> None:
    rubbish = "import os; os.write(CHANNEL, b'\\x82\\xa2is\\xa6warned\\xa7message\\xa1\\xff'); "
    house.starts(rubbish + SAY_HELLO + "os.close(CHANNEL); " + WAIT)
    house.lives_until(house.has_heard_hello)
    house.lives_until(lambda: not house.selector.get_map())
    assert house.nursery, "closing the channel is no end"


@pytest.mark.parametrize("share", [0, 1, 100])
def test_what_was_said_before_a_rank_called_again_is_heard_first(house: House, share: int) -> None:
    """Even what is beyond its share of this tick: nobody hears it later."""
    house.nursery.answer_calls()
    told = [beat(step=step) for step in range(3)]
    last = Warned(message="by another way")
    call = LAST_CALL.format(address=str(house.nursery.newest_socket), said=encode(last))
    house.starts(f"import os; [os.write(CHANNEL, s) for s in {[*map(encode, told)]!r}]\n{call}")
    (child,) = house.nursery.living
    await_value(child.has_exited, lambda: "it does not end")
    child.grant(share)
    while house.nursery:
        house.nursery.settle()
    said = [report.message for report in house.reports if isinstance(report, RankSaid)]
    assert said == [*told, last]


def test_a_rank_that_calls_again_after_its_share_goes_on_by_the_new_way(house: House) -> None:
    house.nursery.answer_calls()
    call = LAST_CALL.format(address=str(house.nursery.newest_socket), said=encode(Hello()))
    flood = f"import os; [os.write(CHANNEL, {encode(beat(step=1))!r}) for _ in range(99)]\n"
    house.starts(f"{flood}{call}\n{WAIT}")
    (child,) = house.nursery.living
    child.grant(1)
    house.lives_until(lambda: child.beats and Hello in child.standing)
    assert len(house.selector.get_map()) == 2, "its new channel, and the reception"
    house.nursery.send_all(signal.SIGKILL)
    house.lives_until_it_is_empty()


class Table:
    """A hearing, one rank without a process, and what is reported of it."""

    def __init__(self, directory: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.reports: list[RankSaid] = []
        self.hearing = Hearing(self.selector, self.reports.append)
        self.child = Child(
            rank=0,
            incarnation=0,
            mark="",
            logbook=LateLogbook(directory / "log", directory / "times"),
            life=Departed(0),
            channel=None,
        )
        self.theirs: list[socket.socket] = []

    def reconnects(self) -> socket.socket:
        """Have the rank call; return what it speaks into."""
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        self.theirs.append(theirs)
        self.hearing.reconnect(self.child, ours)
        return theirs

    def turns(self) -> int:
        """Do what is to be done now; return how much that was."""
        ready = self.selector.select(0)
        for key, _ in ready:
            key.data()
        return len(ready)

    @property
    def said(self) -> list[RankMessage]:
        return [report.message for report in self.reports]

    def close(self) -> None:
        self.selector.close()
        for channel in (*self.theirs, self.child.channel):
            if channel is not None:
                channel.close()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    table = Table(tmp_path)
    yield table
    table.close()


def test_a_rank_without_a_channel_is_heard_once_it_has_called(table: Table) -> None:
    table.hearing.admit(table.child)
    assert not table.selector.get_map()
    table.reconnects().send(encode(Hello()))
    assert table.turns() == 1
    assert table.said == [Hello()]


def test_a_rank_that_was_hushed_is_heard_on_its_new_channel_alone(table: Table) -> None:
    table.hearing.admit(table.child)
    before = table.reconnects()
    table.child.grant(1)
    for step in (1, 2):
        before.send(encode(beat(step=step)))
    assert table.turns() == 1
    assert not table.selector.get_map(), "it has had its share"
    table.reconnects().send(encode(Hello()))
    assert table.said == [beat(step=1), beat(step=2)], "what it said before comes first"
    table.hearing.listen_again()
    assert table.turns() == 1
    assert table.said[2:] == [Hello()]
    (listening,) = table.selector.get_map().values()
    assert listening.fileobj is table.child.channel
    with pytest.raises(BrokenPipeError):
        before.send(b"to nobody")


def test_a_rank_that_was_dismissed_is_not_heard_again(table: Table) -> None:
    table.hearing.admit(table.child)
    channel = table.reconnects()
    channel.send(encode(Hello()))
    table.hearing.dismiss(table.child)
    assert table.said == [Hello()]
    channel.send(encode(beat(step=1)))
    table.hearing.listen_again()
    assert table.turns() == 0
