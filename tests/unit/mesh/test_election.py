"""Nodes elect one master, whatever fails before; each rule is needed."""

import random

import msgspec
import pytest

from muster.mesh.election import (
    AUDIENCE_LIMIT,
    NO_ROWS,
    Ask,
    Candidate,
    Election,
    ElectionMessage,
    Head,
    Mastership,
    Outdated,
    Report,
    State,
    Stored,
    is_clock_credible,
)
from tests.support.elections import World, faults
from tests.support.elections_without import (
    WITHOUT,
    History,
    Listener,
    cluster,
    mastership,
    restarts,
)

HISTORIES = 30
HEAD = Head(session=1, clock=1, time=1000.0, is_new=False)


def test_one_master_leads_after_every_history() -> None:
    assert {seed: found for seed in range(HISTORIES) if (found := faults(Election, seed))} == {}


@pytest.mark.slow
def test_one_master_leads_after_many_and_large_histories() -> None:
    sizes = [(seed, 0) for seed in range(HISTORIES, 400)] + [(0, 50)]
    found = {each: what for each in sizes if (what := faults(Election, *each))}
    assert found == {}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "history"), WITHOUT.items())
def test_every_rule_is_needed(make: type[Election], history: History) -> None:
    assert history(make)
    assert not history(Election)


@pytest.mark.parametrize("offset", [0.0, -86400.0 * 365])
def test_a_node_that_restarts_changes_no_master(offset: float) -> None:
    assert restarts(Election, offset) == []


def test_the_oldest_of_a_cluster_leads_and_another_one_after_it() -> None:
    world = cluster(Election, [0.0, 0.0, 0.0])
    world.run(10.0)
    assert world.masters() == {"n0"}
    world.kill("n0")
    world.run(16.0)
    assert world.masters() == {"n1"}


def test_the_newest_rows_win_then_the_oldest_session_then_the_id() -> None:
    written, acknowledged = ((3, 7), (4, 9)), ((3, 8), (3, 8))
    rank = Candidate(start=1.0, copy=written).rank("a")
    assert rank > Candidate(start=2.0, copy=written).rank("b")
    assert rank < Candidate(start=1.0, copy=written).rank("b")
    assert rank < Candidate(start=2.0, copy=acknowledged).rank("a")
    assert rank > Candidate(start=0.0, copy=((3, 7), (4, 8))).rank("b")


def test_a_master_that_may_not_lead_gives_up() -> None:
    world = cluster(Election, [0.0, 0.0, 0.0])
    world.run(10.0)
    world.permit("n0", may_lead=False)
    world.run(20.0)
    assert world.masters() == {"n1"}


def test_a_master_raises_its_epoch_for_a_report_and_no_question() -> None:
    world = cluster(Election, [0.0])
    world.run(10.0)
    leader = world.nodes["n0"].election
    assert leader is not None
    head = Head(session=1, clock=5, time=1000.0, is_new=False)
    # The sender may lead, and better: both would raise in turns.
    leader.receive("n1", Ask(head=head, nonce=1), world.now)
    assert (leader.state, leader.epoch) == (State.MASTER, 1)
    leader.receive("n1", Report(head=head), world.now)
    assert leader.epoch == 6


def test_nodes_that_may_not_lead_have_no_master() -> None:
    world = cluster(Election, [0.0, 0.0])
    for node in world.nodes.values():
        node.may_lead = False
    world.run(20.0)
    assert world.masters() == {None}


def test_a_node_without_a_disk_says_nothing() -> None:
    world: World = cluster(Election, [0.0])
    world.nodes["n0"].has_disk = False
    world.run(20.0)
    assert (world.sent, world.masters()) == (0, {None})


def test_what_is_sent_is_stored_before() -> None:
    chance = random.Random(1)  # noqa: S311  repeatable, not secret
    election = Election("b", Stored(session=4, clock=7), 0.0, 0.0, chance)
    assert election.take().stored == Stored(session=5, clock=7)
    while election.state is not State.MASTER:
        election.check(election.wake_at())
    assert (election.epoch, election.take().stored) == (8, Stored(session=5, clock=8))
    assert election.take().stored is None


def test_a_node_with_an_old_backup_jumps_over_its_last_session() -> None:
    listener = Listener(Election)
    listener.election.receive("a", Outdated(head=HEAD, known=9), 1.0)
    assert listener.election.session == 10
    listener.election.receive("a", Outdated(head=HEAD, known=3), 1.0)
    assert listener.election.session == 10


def test_an_old_session_is_answered_with_the_known_one() -> None:
    listener = Listener(Election)
    listener.hear(0.1, mastership(session=5))
    listener.election.take()
    listener.hear(0.2, mastership(session=4, beat=9))
    [(to, message)] = listener.election.take().messages
    assert (to, isinstance(message, Outdated) and message.known) == ("a", 5)


def test_a_master_in_a_new_session_is_followed_no_more() -> None:
    listener = Listener(Election)
    listener.follow(0.1, mastership(session=5))
    listener.hear(0.2, mastership(session=6))
    assert listener.election.master is None


def test_many_nodes_are_asked_in_part() -> None:
    listener = Listener(Election)
    for number in range(40):
        listener.election.meet(f"n{number}", 0.0)
    listener.asked()
    listener.election.check(0.5)
    assert len(listener.asked()) == AUDIENCE_LIMIT


@pytest.mark.parametrize(
    ("offsets", "is_credible"),
    [
        ([], True),
        ([7200.0], True),  # of two nodes, neither is in the minority
        ([7200.0, -7200.0], False),
        ([7200.0, 0.0], True),
        ([7200.0, 7200.0, 0.0], True),
        ([3600.0, -3600.0], True),
    ],
)
def test_a_clock_unlike_those_of_most_may_not_lead(
    offsets: list[float], *, is_credible: bool
) -> None:
    assert is_clock_credible(offsets) is is_credible


@pytest.mark.parametrize(
    "message",
    [
        Ask(head=HEAD, nonce=1, candidate=Candidate(start=1.0, copy=NO_ROWS)),
        Report(head=HEAD, mastership=Mastership(node="a", session=1, epoch=2, start=0.5, beat=3)),
        Outdated(head=HEAD, known=4),
    ],
)
def test_messages_arrive_as_they_were_sent(message: ElectionMessage) -> None:
    sent = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(sent, type=ElectionMessage) == message
