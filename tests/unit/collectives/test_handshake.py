from dataclasses import replace

import pytest

from muster.collectives.errors import PeerRefused
from muster.collectives.transports.handshake import (
    CallingRank,
    Membership,
    answer,
    call,
    caller_of,
)
from muster.contracts.errors import AuthenticationFailed

ZERO = Membership(rank=0, world_size=3, generation=5, token=b"token")
ONE = replace(ZERO, rank=1)


def talk(caller: Membership, answerer: Membership, peer: int = 0) -> CallingRank:
    """Let them shake hands to the end."""
    calling = call(caller, peer, 4711, is_sealed=False)
    answering = answer(answerer, is_sealed=False)
    answering.receive(calling.take())
    calling.receive(answering.take())
    answering.receive(calling.take())
    assert calling.is_open
    assert answering.is_open
    return caller_of(answering)


def test_answerer_learns_rank_and_port_of_the_caller() -> None:
    assert talk(ONE, ZERO) == (1, 4711)


def test_caller_that_wants_another_rank_is_refused() -> None:
    with pytest.raises(PeerRefused, match="asked for rank 2"):
        talk(ONE, ZERO, peer=2)


@pytest.mark.parametrize(
    "changed", [{"generation": 4}, {"generation": 6}, {"world_size": 4}, {"rank": 2}]
)
def test_another_group_or_rank_is_refused(changed: dict[str, int]) -> None:
    with pytest.raises(PeerRefused, match="end the remaining processes of the other group"):
        talk(ONE, replace(ZERO, **changed))


def test_ranks_that_count_other_hosts_are_refused() -> None:
    with pytest.raises(PeerRefused, match="ranks 1 and 0 were given different addresses"):
        talk(replace(ONE, hosts=(0, 0, 1)), replace(ZERO, hosts=(0, 1, 1)))


def test_both_ends_must_see_alike_whether_they_seal() -> None:
    calling, answering = call(ONE, 0, 4711, is_sealed=False), answer(ZERO, is_sealed=True)
    with pytest.raises(AuthenticationFailed, match="there is a relay between them"):
        answering.receive(calling.take())
