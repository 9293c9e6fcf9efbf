"""What an agent reads of real ranks, how much at once, and on which channel."""

import signal
from math import ceil

import pytest

from muster.contracts.messages import Hello, Orphaned, RankExited, RankMessage, RankSaid, Warned
from muster.contracts.wire import encode
from tests.support.house import PATIENCE_SECONDS, RECONNECT_AND_SEND, SAY_HELLO, WAIT, House
from tests.support.installation import await_value
from tests.support.stories import beat, saved
from worker.rank import PACKET_BYTES, PACKETS_LIMIT


def test_messages_of_an_exited_rank_are_reported_once(house: House) -> None:
    house.starts(SAY_HELLO)
    (listening,) = house.selector.get_map().values()
    house.lives_until_it_is_empty()
    before = list(house.reports)
    listening.data()  # as the loop does if both were ready
    assert house.reports == before


FLOOD = (
    "import os; os.set_blocking(CHANNEL, True); said = {said!r}\n"
    "while True: os.write(CHANNEL, said)"
)
LARGEST = Orphaned(by="x" * 65000)


@pytest.mark.parametrize(
    ("message", "share"),
    [
        (beat(step=1), PACKETS_LIMIT),
        (saved(1), PACKETS_LIMIT),
        (LARGEST, ceil(PACKETS_LIMIT * PACKET_BYTES / len(encode(LARGEST)))),
    ],
)
def test_a_rank_that_floods_its_channel_gets_its_share_only(
    house: House, message: RankMessage, share: int
) -> None:
    house.starts(FLOOD.format(said=encode(message)), rank=0)
    house.starts(SAY_HELLO + WAIT, rank=1)

    def count_of(rank: int) -> int:
        reports = [report for report in house.reports if isinstance(report, RankSaid)]
        return sum(report.rank == rank for report in reports)

    for ticks in (1, 2, 3):
        while count_of(0) < ticks * share or not count_of(1):
            for key, _ in house.selector.select(PATIENCE_SECONDS):
                key.data()
        assert (count_of(0), count_of(1)) == (ticks * share, 1)
        assert len(house.selector.get_map()) == 1, "only the other rank is read"
        house.ranks.tick()


def test_messages_beyond_the_share_are_read_after_the_exit(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.rank.PACKETS_LIMIT", 3)
    sent = [beat(step=step) for step in range(50)]
    house.starts(f"import os; [os.write(CHANNEL, said) for said in {[*map(encode, sent)]!r}]")
    for key, _ in house.selector.select(PATIENCE_SECONDS):
        key.data()
    while house.ranks:  # no further tick
        house.ranks.settle()
    said = [report.message for report in house.reports if isinstance(report, RankSaid)]
    assert said == sent
    assert isinstance(house.reports[-1], RankExited)


def test_a_program_may_write_garbage_into_its_channel(house: House) -> None:
    rubbish = "import os; os.write(CHANNEL, b'\\x82\\xa2is\\xa6warned\\xa7message\\xa1\\xff'); "
    house.starts(rubbish + SAY_HELLO + "os.close(CHANNEL); " + WAIT)
    house.lives_until(house.has_heard_hello)
    house.lives_until(lambda: not house.selector.get_map())
    assert house.ranks, "closing the channel is not an exit"


@pytest.mark.parametrize("share", [0, 1, 100])
def test_the_old_channel_is_read_before_the_new_one(house: House, share: int) -> None:
    """Also beyond its share: it could not be read later."""
    house.ranks.listen()
    sent = [beat(step=step) for step in range(3)]
    last = Warned(message="on another channel")
    call = RECONNECT_AND_SEND.format(address=str(house.ranks.newest_socket), said=encode(last))
    house.starts(f"import os; [os.write(CHANNEL, s) for s in {[*map(encode, sent)]!r}]\n{call}")
    (rank_process,) = house.ranks.running
    await_value(rank_process.process.has_exited, lambda: "it does not end")
    rank_process.grant(share)
    while house.ranks:
        house.ranks.settle()
    said = [report.message for report in house.reports if isinstance(report, RankSaid)]
    assert said == [*sent, last]


def test_a_paused_rank_that_reconnects_is_read_again(house: House) -> None:
    house.ranks.listen()
    call = RECONNECT_AND_SEND.format(address=str(house.ranks.newest_socket), said=encode(Hello()))
    flood = f"import os; [os.write(CHANNEL, {encode(beat(step=1))!r}) for _ in range(99)]\n"
    house.starts(f"{flood}{call}\n{WAIT}")
    (rank_process,) = house.ranks.running
    rank_process.grant(1)
    house.lives_until(lambda: Hello() in [said.message for said in rank_process.kept_messages()])
    assert len(house.selector.get_map()) == 2, "its new channel, and the listener"
    house.ranks.signal_all(signal.SIGKILL)
    house.lives_until_it_is_empty()
