from dataclasses import replace

import pytest

from muster.collectives.errors import PeerRefused
from muster.collectives.transports.handshake import Caller, Membership, answer, call

ZERO = Membership(rank=0, world_size=3, generation=5, token=b"token")
ONE = replace(ZERO, rank=1)


def talk(caller: Membership, answerer: Membership, peer: int = 0) -> Caller:
    """Let them shake hands to the end."""
    calling, answering = (
        call(caller, peer, 4711, is_sealed=False),
        answer(answerer, is_sealed=False),
    )
    hello, wanted = next(calling).send, next(answering).size_bytes
    assert len(hello) == wanted
    with pytest.raises(StopIteration) as end:
        answering.send(calling.send(answering.send(hello).send).send)
    found: Caller = end.value.value
    return found


def test_answerer_learns_rank_and_port_of_the_caller() -> None:
    assert talk(ONE, ZERO)[:2] == (1, 4711)


def test_caller_that_wants_another_rank_is_refused() -> None:
    with pytest.raises(PeerRefused, match="asked for rank 2"):
        talk(ONE, ZERO, peer=2)


def test_replayed_call_is_refused() -> None:
    calling, answering = call(ONE, 0, 4711, is_sealed=False), answer(ZERO, is_sealed=False)
    hello, _ = next(calling).send, next(answering)
    proof = calling.send(answering.send(hello).send).send
    again = answer(ZERO, is_sealed=False)
    next(again)
    again.send(hello)
    with pytest.raises(PeerRefused, match="token"):
        again.send(proof)


def test_replayed_answer_is_refused() -> None:
    calling, answering = call(ONE, 0, 4711, is_sealed=False), answer(ZERO, is_sealed=False)
    next(answering)
    heard = answering.send(next(calling).send).send
    again = call(ONE, 0, 4711, is_sealed=False)
    next(again)
    with pytest.raises(PeerRefused, match="token"):
        again.send(heard)
