"""What a stranger, or a network between two hosts, may do to the conversation of a link."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.contracts.errors import AuthenticationFailed, MusterError, WireError
from muster.links.frames import CONTROL_FRAME_LIMIT_BYTES, FrameReader, frame
from muster.links.identity import Identity, Kind
from muster.links.session import (
    HELLO_LIMIT_BYTES,
    Answerer,
    Caller,
    ProtocolDiffers,
    Session,
    State,
)

CLAIM = b"an agent of a job"
IDENTITY = Identity(Kind.JOB, CLAIM, b"the digest of a token")


VECTOR = {
    "hello": (
        "2b000000000000006d757374657200010101000102030405060708090a0b0c0d0e0f616e20616765"
        "6e74206f662061206a6f62"
    ),
    "answer": (
        "38000000000000006d757374657200010000000000000000000000000000000097624152d7f20609"
        "89734f5a0f452c7b6a5fff58fe19e239983297a96660b806"
    ),
    "proof": "2000000000000000483eb2aa14d376cf7f94ea7bee6cbb20a989e9b2119a525268be16ab281f9366",
    "from caller": "1700000000000000581de9e2d63339dd00348b38eca21756bc72b00f6c3f2c",
    "from answerer": "17000000000000003c5c184fa68e9acf3bd026647f10d58f3f48b031e74bda",
}


def calling(identity: Identity = IDENTITY, *, is_sealed: bool = True) -> Caller:
    return Caller(identity, is_sealed=is_sealed)


def answering(identity: Identity = IDENTITY, *, is_sealed: bool = True) -> Answerer:
    return Answerer(lambda _: identity, is_sealed=is_sealed)


def opened(*, is_sealed: bool = True) -> tuple[Caller, Answerer]:
    """Return both ends of a link that is open."""
    caller, answerer = calling(is_sealed=is_sealed), answering(is_sealed=is_sealed)
    answerer.receive(caller.take())
    caller.receive(answerer.take())
    answerer.receive(caller.take())
    return caller, answerer


def sent(session: Session, *payloads: bytes) -> list[bytes]:
    """Return the frames in which a session sends the payloads."""
    frames = []
    for payload in payloads:
        session.send(payload)
        frames.append(session.take())
    return frames


def test_the_bytes_of_a_link_never_change() -> None:
    """Computed by hand from RFC 2104, RFC 5869 and NIST SP 800-38D, with other code."""
    caller = Caller(IDENTITY, nonce=bytes(range(16)))
    answerer = Answerer(lambda _: IDENTITY, nonce=bytes(16))
    said = caller.take()
    assert said.hex() == VECTOR["hello"]
    answerer.receive(said)
    said = answerer.take()
    assert said.hex() == VECTOR["answer"]
    caller.receive(said)
    said = caller.take()
    assert said.hex() == VECTOR["proof"]
    answerer.receive(said)
    assert sent(caller, b"payload")[0].hex() == VECTOR["from caller"]
    assert sent(answerer, b"payload")[0].hex() == VECTOR["from answerer"]


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("size", [1, 7, 1 << 16])
def test_payloads_arrive_in_order_in_both_directions(size: int, *, is_sealed: bool) -> None:
    caller, answerer = calling(is_sealed=is_sealed), answering(is_sealed=is_sealed)
    payloads = [b"", b"one", b"two" * 1000]
    got: dict[Session, list[bytes]] = {caller: [], answerer: []}
    for payload in payloads:  # before the link is open
        caller.send(payload)
        answerer.send(payload)
    quiet = 0
    while quiet < 2:
        for sender, receiver in (caller, answerer), (answerer, caller):
            said = sender.take()
            quiet = 0 if said else quiet + 1
            for start in range(0, len(said), size):
                got[receiver] += receiver.receive(said[start : start + size])
    assert got == {caller: payloads, answerer: payloads}
    assert answerer.claim == CLAIM
    assert (b"two" in sent(caller, b"two")[0]) is not is_sealed


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_caller_that_proves_nothing_is_refused(*, is_sealed: bool) -> None:
    answerer = answering(is_sealed=is_sealed)
    with pytest.raises(AuthenticationFailed, match="not the beginning of a link"):
        answerer.receive(frame(b"hello"))
    with pytest.raises(AuthenticationFailed, match="the link is closed"):
        answerer.receive(calling(is_sealed=is_sealed).take())


@pytest.mark.parametrize("number", [0, 2, 255])
def test_both_ends_say_that_their_protocols_differ(number: int) -> None:
    def other(said: bytes) -> bytes:
        """Return what an end of another protocol would have said."""
        [content] = FrameReader().feed(said)
        return frame(content[:7] + bytes([number]) + content[8:])

    answerer = answering()
    with pytest.raises(ProtocolDiffers, match=f"has links of protocol {number}, this one of proto"):
        answerer.receive(other(calling().take()))
    caller = calling()
    with pytest.raises(ProtocolDiffers, match="install the same Muster on both hosts"):
        caller.receive(other(answerer.take()))


@pytest.mark.parametrize(
    ("caller", "answerer"),
    [
        (calling(Identity(Kind.JOB, CLAIM, b"another")), answering()),
        (calling(Identity(Kind.GROUP, CLAIM, IDENTITY.secret)), answering()),
        (calling(is_sealed=False), answering()),
        (calling(), answering(is_sealed=False)),
    ],
    ids=["secret", "kind", "would not seal", "would seal"],
)
def test_ends_that_do_not_agree_never_open(caller: Caller, answerer: Answerer) -> None:
    def shake_hands() -> None:
        answerer.receive(caller.take())
        caller.receive(answerer.take())

    with pytest.raises(AuthenticationFailed):
        shake_hands()
    assert State.OPEN not in {caller.state, answerer.state}


def test_a_caller_without_the_secret_never_opens() -> None:
    answerer, caller = answering(), calling()
    answerer.receive(caller.take())
    with pytest.raises(AuthenticationFailed, match="has another token, or none"):
        answerer.receive(frame(bytes(32)))
    assert answerer.state is State.CLOSED


def test_what_was_said_before_opens_nothing() -> None:
    caller, answerer = calling(), answering()
    hello = caller.take()
    answerer.receive(hello)
    answer = answerer.take()
    caller.receive(answer)
    proof = caller.take()
    answerer.receive(proof)
    again = answering()
    again.receive(hello)
    with pytest.raises(AuthenticationFailed):  # replayed to another answerer
        again.receive(proof)
    with pytest.raises(AuthenticationFailed):  # replayed to another caller
        calling().receive(answer)


def test_what_is_sent_back_opens_nothing() -> None:
    caller, answerer = calling(), answering()
    hello = caller.take()
    with pytest.raises(AuthenticationFailed):
        caller.receive(hello)
    answerer.receive(hello)
    [answer] = FrameReader().feed(answerer.take())
    with pytest.raises(AuthenticationFailed):
        answerer.receive(frame(answer[-32:]))
    caller, answerer = opened()
    with pytest.raises(AuthenticationFailed):
        caller.receive(sent(caller, b"mine")[0])


@pytest.mark.parametrize("end", [calling, answering, Session])
def test_a_huge_length_ends_a_link(end: Callable[[], Session]) -> None:
    session = end()
    with pytest.raises(AuthenticationFailed, match=f"announced a frame of {2**63} bytes"):
        session.receive((2**63).to_bytes(8, "little"))
    assert session.state is State.CLOSED
    with pytest.raises(MusterError):
        session.receive(frame(b"more"))
    assert session.state is State.CLOSED


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_payload_that_is_too_long_breaks_no_link(*, is_sealed: bool) -> None:
    too_long = bytes(CONTROL_FRAME_LIMIT_BYTES + 1 - 16 * is_sealed)
    caller, answerer = opened(is_sealed=is_sealed)
    for session in caller, calling(is_sealed=is_sealed):
        with pytest.raises(WireError, match="is longer than the limit"):
            session.send(too_long)
    answerer.frames.limit_bytes = CONTROL_FRAME_LIMIT_BYTES  # as its owner does
    payloads = [too_long[1:], b"next"]
    assert [answerer.receive(it) for it in sent(caller, *payloads)] == [[it] for it in payloads]


@pytest.mark.parametrize("end", [calling, answering])
def test_a_stranger_is_read_only_shortly(end: Callable[[], Session]) -> None:
    with pytest.raises(AuthenticationFailed, match=f"the limit is {HELLO_LIMIT_BYTES}"):
        end().receive((HELLO_LIMIT_BYTES + 1).to_bytes(8, "little"))


@dataclass
class Network:
    """What lies between two ends, and has seen all that they have sent."""

    data: st.DataObject
    seen: list[bytes]

    def deliver(self, said: bytes) -> bytes:
        """Return what comes instead of `said`: half of the time the same."""
        self.seen.append(said)
        place = self.data.draw(st.integers(0, max(0, len(said) - 1)))
        changed = bytearray(said)
        changed[place : place + 1] = [byte ^ 1 << place % 8 for byte in changed[place : place + 1]]
        other = self.data.draw(st.sampled_from(self.seen))
        return self.data.draw(
            st.sampled_from([said, said, said, said[:place], bytes(changed), other, said + other])
        )


@pytest.mark.slow
@pytest.mark.parametrize("is_sealed", [True, False])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_network_can_only_end_a_link(data: st.DataObject, *, is_sealed: bool) -> None:
    """It reorders, cuts, changes, repeats, reflects and adds, in any pieces."""
    ends = calling(is_sealed=is_sealed), answering(is_sealed=is_sealed)
    payloads = [bytes([number]) * 3 for number in range(4)]
    got: list[list[bytes]] = [[], []]
    network = Network(data, [calling(is_sealed=is_sealed).take(), frame(bytes(32)), b"\xff" * 8])
    for payload in payloads:
        for end in ends:
            end.send(payload)
    for _ in range(data.draw(st.integers(1, 8))):
        receiver = data.draw(st.integers(0, 1))
        said = network.deliver(ends[1 - receiver].take())
        size = data.draw(st.integers(1, 64))
        with suppress(MusterError):
            for start in range(0, len(said), size):
                got[receiver] += ends[receiver].receive(said[start : start + size])
    if is_sealed:
        for received in got:
            assert received == payloads[: len(received)]
    if ends[0].is_open:  # the answerer has proved that it has the secret, and the same words
        assert ends[1].claim == CLAIM
