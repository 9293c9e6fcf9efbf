"""The conversation of a link: bytes in, payloads and bytes to send out. No I/O and no clock.

    caller                                         answerer
    AWAITS_ANSWER   -- hello: nonce, claim ->      AWAITS_HELLO
                    <- answer: nonce, claim, proof --  AWAITS_PROOF
    OPEN            -- proof ->                    OPEN
                    <- payloads ->
    CLOSED          after any error                CLOSED

Both begin with a protocol number; ends that differ say so, and close. Each proof covers everything
that was said before it and the role of its sender, so it cannot be replayed, sent back, or used
for another claim. Payloads wait for the proof of the other end, and are sealed with keys from the
same secret and the same words, unless both ends have said that the connection stays on its host.
"""

import secrets
import struct
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from muster.contracts.errors import AuthenticationFailed, WireError, move
from muster.links.frames import (
    CONTROL_FRAME_LIMIT_BYTES,
    TAG_BYTES,
    FrameReader,
    check_size,
    frame,
)
from muster.links.identity import Find, Identity

if TYPE_CHECKING:
    from muster.links.sealing import Cipher

PROTOCOL: Final = 1
"""Of what is said here. Messages, which are payloads, have their own (`contracts.interpreter`)."""

HELLO_LIMIT_BYTES: Final = 4096
"""What a caller takes as the answer, and an answerer until its owner knows the caller: claims and
hellos have a few hundred."""

_MAGIC: Final = b"muster\0"  # a number in MessagePack, so no message begins with it
_START: Final = _MAGIC + bytes([PROTOCOL])
_NONCE_BYTES: Final = 16
_HELLO: Final = struct.Struct(f"<{len(_START)}sB?{_NONCE_BYTES}s")
"""Magic and protocol, kind, is sealed, nonce. The claim follows."""


class ProtocolDiffers(AuthenticationFailed):
    def __init__(self, number: int) -> None:
        super().__init__(
            f"the other end has links of protocol {number}, this one of protocol {PROTOCOL}: "
            "install the same Muster on both hosts"
        )


class State(StrEnum):
    AWAITS_HELLO = "awaits hello"
    AWAITS_ANSWER = "awaits answer"
    AWAITS_PROOF = "awaits proof"
    OPEN = "open"
    CLOSED = "closed"


_MOVES: Final[Mapping[State, frozenset[State]]] = {
    State.AWAITS_HELLO: frozenset({State.AWAITS_PROOF, State.CLOSED}),
    State.AWAITS_ANSWER: frozenset({State.OPEN, State.CLOSED}),
    State.AWAITS_PROOF: frozenset({State.OPEN, State.CLOSED}),
    State.OPEN: frozenset({State.CLOSED}),
    State.CLOSED: frozenset({State.CLOSED}),
}


class Session:
    """One end of a conversation; by itself one in clear, in which nothing is proved."""

    def __init__(self, state: State = State.OPEN, *, is_sealed: bool = False) -> None:
        self.state = state
        self.is_sealed = is_sealed
        self.frames = FrameReader()
        self.claim = b""
        """What the other end has said of itself in clear."""
        self.cipher: Cipher | None = None
        """Of an open session, if it is sealed."""
        self._due: list[bytes] = []
        self._waiting: list[bytes] = []

    @property
    def is_open(self) -> bool:
        """True once the other end has proved itself."""
        return self.state is State.OPEN

    @property
    def waiting_bytes(self) -> int:
        """The size of the payloads that wait until the session is open."""
        return sum(map(len, self._waiting))

    def send(self, payload: bytes | memoryview) -> None:
        """Make a payload due, or have it wait. Raises `WireError` if it is too long."""
        # Before it is sealed, as the other end counts, and before it waits.
        check_size(memoryview(payload).nbytes + TAG_BYTES * self.is_sealed)
        if not self.is_open:
            self._waiting.append(bytes(payload))
        else:
            content = bytes(payload) if self.cipher is None else self.cipher.seal(payload)
            self._due.append(frame(content))

    def take(self) -> bytes:
        """Return what is due: it is to be sent next, also after an error."""
        due, self._due = b"".join(self._due), []
        return due

    def receive(self, data: bytes | bytearray) -> list[bytes]:
        """Return the payloads that `data` completes.

        Raises `AuthenticationFailed`, and what the answerer's `find` raises. Nothing is believed
        after that, nor returned of the same `data`: send what is due, and close the connection.
        """
        if self.state is State.CLOSED:
            raise AuthenticationFailed("the link is closed")
        try:
            return [part for content in self.frames.feed(data) for part in self._take_in(content)]
        except WireError as error:  # on its way a length may be changed, too
            self._move(State.CLOSED)
            raise AuthenticationFailed(str(error)) from error
        except Exception:
            self._move(State.CLOSED)
            raise

    def _take_in(self, content: bytes) -> list[bytes]:
        if not self.is_open:
            self._converse(content)
            return []
        return [content if self.cipher is None else self.cipher.open(content)]

    def _converse(self, content: bytes) -> None:
        """Take in a frame before the session is open."""
        raise NotImplementedError

    def _move(self, target: State) -> None:
        self.state = move(_MOVES, self.state, target)
        while self.is_open and self._waiting:
            self.send(self._waiting.pop(0))

    def _open(self, identity: Identity, said: bytes, *, is_caller: bool) -> None:
        if self.is_sealed:
            # Here and not above: on one host the ciphers would only cost time and memory.
            from muster.links.sealing import Cipher, derive_keys  # noqa: PLC0415

            self.cipher = Cipher(derive_keys(identity.secret, said, is_caller=is_caller))
        self._move(State.OPEN)


class Caller(Session):
    """The end that connects. Tests choose the nonce."""

    def __init__(self, identity: Identity, *, is_sealed: bool = True, nonce: bytes = b"") -> None:
        super().__init__(State.AWAITS_ANSWER, is_sealed=is_sealed)
        self.frames.limit_bytes = HELLO_LIMIT_BYTES
        nonce = nonce or secrets.token_bytes(_NONCE_BYTES)
        self._identity = identity
        self._hello = _HELLO.pack(_START, identity.kind, is_sealed, nonce) + identity.claim
        self._due.append(frame(self._hello))

    def _converse(self, content: bytes) -> None:
        _check_start(content)
        size = self._identity.proof_bytes
        answer, proof = content[:-size], content[-size:]
        self.claim = answer[len(_START) + _NONCE_BYTES :]
        said = self._hello + answer
        self._identity.check(b"answer", said, proof, self.claim)
        self.frames.limit_bytes = CONTROL_FRAME_LIMIT_BYTES
        self._due.append(frame(self._identity.prove(b"call", said)))
        self._open(self._identity, said, is_caller=True)


class Answerer(Session):
    """The end that accepts. Tests choose the nonce."""

    def __init__(self, find: Find, *, is_sealed: bool = True, nonce: bytes = b"") -> None:
        super().__init__(State.AWAITS_HELLO, is_sealed=is_sealed)
        self.frames.limit_bytes = HELLO_LIMIT_BYTES
        self._find = find
        self._nonce = nonce or secrets.token_bytes(_NONCE_BYTES)
        self._identity: Identity | None = None
        self._said = b""

    def _converse(self, content: bytes) -> None:
        if self._identity is not None:
            self._identity.check(b"call", self._said, content, self.claim)
            self._open(self._identity, self._said, is_caller=False)
        else:
            self._identity = self._identified(content)
            self._move(State.AWAITS_PROOF)
            answer = _START + self._nonce + self._identity.answer
            self._said = content + answer
            self._due.append(frame(answer + self._identity.prove(b"answer", self._said)))

    def _identified(self, hello: bytes) -> Identity:
        """Return what a caller with this hello has to prove."""
        try:
            _check_start(hello)
        except ProtocolDiffers:
            self._due.append(frame(_START))  # so that the caller can say it as well
            raise
        # One that is cut short makes no claim.
        _, kind, will_seal, _ = _HELLO.unpack(hello[: _HELLO.size].ljust(_HELLO.size, b"\0"))
        self.claim = hello[_HELLO.size :]
        identity = self._find(self.claim)
        if will_seal != self.is_sealed:
            # Or a relay could have one of them speak in clear.
            raise AuthenticationFailed(
                "the caller is on another host at one end of its connection and on this host at "
                "the other: there is a relay between them; connect the hosts directly"
            )
        if kind != identity.kind:
            raise AuthenticationFailed("a link of another kind was begun here")
        return identity


def _check_start(content: bytes) -> None:
    if content[: len(_MAGIC)] != _MAGIC or len(content) < len(_START):
        raise AuthenticationFailed("this is not the beginning of a link: restrict access to it")
    if (number := content[len(_MAGIC)]) != PROTOCOL:
        raise ProtocolDiffers(number)
