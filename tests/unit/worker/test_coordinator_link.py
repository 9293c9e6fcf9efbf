import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from muster.contracts.messages.agent import (
    AgentHello,
    CoordinatorMessage,
    Dismiss,
    TerminateRank,
    Welcome,
)
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.messages.wire import decode_agent_claim, decode_agent_message, encode
from muster.contracts.token import sha256_of
from muster.links.frames import FrameReader, frame
from muster.links.identity import Identity, job_identity
from muster.links.sealing import Cipher
from muster.links.session import Answerer
from worker.coordinator.link import CoordinatorLink

HELLO = AgentHello(job_uid="uid", host="local", agent_number=1, token="secret")  # noqa: S106  for a test
ORDER = TerminateRank(rank=0, attempt=0)
PATIENCE_SECONDS = 10.0


class Wire:
    """A link, its selector, and a coordinator with a listening socket."""

    def __init__(self, directory: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.received: list[CoordinatorMessage] = []
        self.address_file = directory / "coordinator.json"
        self.link = self.link_to()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._accepted: list[socket.socket] = []
        port = self._listening.getsockname()[1]
        self.address = CoordinatorAddress(host="127.0.0.1", port=port)
        self.is_published_at(port)

    def link_to(
        self,
        coordinator: CoordinatorAddress | None = None,
        on_message: Callable[[CoordinatorMessage], None] | None = None,
    ) -> CoordinatorLink:
        """Return the link of an agent of the coordinator's host, or of one that began with this."""
        assignment = AgentAssignment(
            job_uid=HELLO.job_uid,
            host=HELLO.host,
            agent_number=HELLO.agent_number,
            token=HELLO.token,
            job_root="",
            address_file=str(self.address_file),
            coordinator=coordinator,
            is_managed=False,
            orphan_timeout_seconds=0,
            stop_grace_seconds=0,
            agent_heartbeat_seconds=1,
            max_log_bytes=0,
        )
        return CoordinatorLink(assignment, self.selector, on_message or self.received.append)

    def is_published_at(self, port: int, way: int = 0) -> None:
        address = CoordinatorAddress(host="127.0.0.1", port=port, number=(1, way))
        self.address_file.write_bytes(msgspec.json.encode(address))

    def accepts(self) -> socket.socket:
        connection, _ = self._listening.accept()
        connection.settimeout(PATIENCE_SECONDS)
        self._accepted.append(connection)
        return connection

    def turns_until(self, condition: Callable[[], bool]) -> None:
        """Run the agent's loop until the condition holds."""
        while not condition():
            ready = self.selector.select(PATIENCE_SECONDS)
            assert ready, "nothing is ready"
            for key, _ in ready:
                key.data()

    def close(self) -> None:
        self.link.close()
        for connection in [self._listening, *self._accepted]:
            connection.close()
        self.selector.close()


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(tmp_path)
    yield wire
    wire.close()


def test_nothing_is_sent_before_the_coordinator_has_proved_itself(wire: Wire) -> None:
    """Another user may have bound the port of one that has ended."""
    assert wire.link.connect()
    wire.link.send(HELLO)
    coordinator = wire.accepts()
    wire.turns_until(lambda: not wire.link._link._unsent)  # noqa: SLF001
    [said] = FrameReader().feed(coordinator.recv(1 << 16))
    assert said.startswith(b"muster\0")
    assert HELLO.token.encode() not in said
    coordinator.sendall(frame(encode(Welcome(epoch=1))))
    wire.turns_until(lambda: not wire.link.is_open)
    assert coordinator.recv(1) == b""
    assert wire.received == []


def test_messages_sent_while_connecting_arrive_in_order(wire: Wire) -> None:
    assert wire.link.connect()
    wire.link.send(HELLO)
    wire.link.send(HELLO)
    coordinator, session = opened(wire)
    assert list(map(decode_agent_message, collect(wire, coordinator, session, 2))) == [HELLO, HELLO]


def test_messages_that_arrive_in_pieces_are_complete(wire: Wire) -> None:
    wire.link.connect()
    coordinator, _ = opened(wire)
    content = frame(encode(Welcome(epoch=1))) + frame(encode(ORDER))
    for byte in content:
        coordinator.sendall(bytes([byte]))
    wire.turns_until(lambda: len(wire.received) == 2)
    assert wire.received == [Welcome(epoch=1), ORDER]


@pytest.mark.parametrize(
    "content", [b"\xff" * 8, frame(b"no message"), frame(encode(HELLO)), frame(b"\x81\xa1\xff\x00")]
)
def test_a_protocol_error_closes_the_connection(
    wire: Wire, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        wire.link.connect()
        coordinator, _ = opened(wire)
        wire.link.is_welcome = True
        coordinator.sendall(content)
        wire.turns_until(lambda: not wire.link.is_open)
    assert wire.received == []
    assert capsys.readouterr().err.count("closed the connection to the coordinator: ") == 1
    assert not wire.link.is_welcome
    assert not wire.selector.get_map()


def test_an_incomplete_frame_ends_with_its_connection(wire: Wire) -> None:
    wire.link.connect()
    first, _ = opened(wire)
    first.sendall(frame(encode(ORDER))[:-1])
    wire.turns_until(lambda: wire.link._link._session.frames._buffer)  # noqa: SLF001  it has come
    first.close()
    wire.turns_until(lambda: not wire.link.is_open)
    assert wire.link.connect()
    second, session = opened(wire)
    second.sendall(frame(encode(ORDER)))
    wire.turns_until(lambda: bool(wire.received))
    assert wire.received == [ORDER]
    wire.link.send(HELLO)
    assert list(map(decode_agent_message, collect(wire, second, session, 1))) == [HELLO]


def test_messages_after_closing_are_ignored(wire: Wire) -> None:
    """The first one closes the link if a replaced coordinator sends welcome and dismiss."""

    def close_link(message: CoordinatorMessage) -> None:
        wire.received.append(message)
        wire.link.close()

    wire.link = wire.link_to(on_message=close_link)
    wire.link.connect()
    coordinator, _ = opened(wire)
    coordinator.sendall(frame(encode(Welcome(epoch=1))) + frame(encode(Dismiss())))
    wire.turns_until(lambda: bool(wire.received))
    assert wire.received == [Welcome(epoch=1)]


def test_a_refused_connection_is_no_error(wire: Wire) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    wire.is_published_at(port)
    if wire.link.connect():
        wire.turns_until(lambda: not wire.link.is_open)
    wire.link.send(HELLO)
    assert not wire.link.is_open


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"host": 3}', b'{"host":"\xff"}'])
def test_an_invalid_address_file_means_no_coordinator(wire: Wire, content: bytes) -> None:
    wire.address_file.write_bytes(content)
    assert not wire.link.connect()
    wire.address_file.unlink()
    assert not wire.link.connect()


def test_a_coordinator_that_does_not_read_is_dropped(wire: Wire) -> None:
    wire.link.connect()
    wire.accepts()
    news = AgentHello(job_uid="x" * 500_000, host="local", agent_number=1, token="")
    sent = 0
    while wire.link.is_open:
        wire.link.send(news)
        sent += 1
        assert sent < 1000
    assert not wire.selector.get_map()


def test_a_new_published_address_is_noticed(wire: Wire) -> None:
    assert wire.link.connect()
    assert not wire.link.has_new_address
    wire.is_published_at(1)
    assert wire.link.has_new_address
    wire.address_file.unlink()
    assert not wire.link.has_new_address, "no other coordinator is known"
    wire.link.close()
    wire.is_published_at(1)
    assert wire.link.has_new_address, "without a connection too"


@pytest.fixture(params=["the agent is remote", "the coordinator is remote now"])
def sealed(wire: Wire, request: pytest.FixtureRequest) -> Wire:
    """The wire between an agent and a coordinator of another host than started it, or is its."""
    wire.is_published_at(wire.address.port, way=1)
    if request.param == "the agent is remote":
        wire.link = wire.link_to(wire.address)
    return wire


def test_an_agent_speaks_in_clear_with_one_that_is_here_now(wire: Wire) -> None:
    wire.link = wire.link_to(wire.address)
    assert wire.link.connect()
    wire.link.send(HELLO)
    coordinator, session = opened(wire)
    assert list(map(decode_agent_message, collect(wire, coordinator, session, 1))) == [HELLO]


def agree(
    wire: Wire, *, token: str = HELLO.token, is_sealed: bool = True
) -> tuple[socket.socket, Answerer]:
    """Accept the link's connection, and prove that its coordinator answers."""

    def find(claim: bytes) -> Identity:
        asked = decode_agent_claim(claim)
        assert (asked.job_uid, asked.agent_number) == (HELLO.job_uid, HELLO.agent_number)
        return job_identity(claim, sha256_of(token))

    coordinator, session = wire.accepts(), Answerer(find, is_sealed=is_sealed)
    wire.turns_until(lambda: not wire.link._link._unsent)  # noqa: SLF001
    answer = b""
    while not answer:
        session.receive(coordinator.recv(session.frames.missing_bytes))
        answer = session.take()
    coordinator.sendall(answer)
    return coordinator, session


def opened(wire: Wire) -> tuple[socket.socket, Answerer]:
    """Accept the link's connection as the coordinator of its host, and prove so."""
    coordinator, session = agree(wire, is_sealed=False)
    wire.turns_until(lambda: wire.link._link._session.is_open)  # noqa: SLF001
    return coordinator, session


def collect(wire: Wire, coordinator: socket.socket, session: Answerer, count: int) -> list[bytes]:
    """Return what the link sends, from its proof on."""
    wire.turns_until(lambda: not wire.link._link._session.waiting_bytes)  # noqa: SLF001
    wire.turns_until(lambda: not wire.link._link._unsent)  # noqa: SLF001
    received: list[bytes] = []
    while len(received) < count or not session.is_open:
        received += session.receive(coordinator.recv(session.frames.missing_bytes))
    return received


def test_what_was_sent_before_the_proof_arrives_sealed(sealed: Wire) -> None:
    assert sealed.link.connect()
    sealed.link.send(HELLO)
    sealed.turns_until(lambda: not sealed.link._link._unsent)  # noqa: SLF001
    coordinator, session = agree(sealed)
    sealed.turns_until(lambda: sealed.link._link._session.is_open)  # noqa: SLF001
    sealed.link.send(HELLO)
    payloads = collect(sealed, coordinator, session, 2)
    assert session.is_sealed
    assert list(map(decode_agent_message, payloads)) == [HELLO, HELLO]
    for message in (Welcome(epoch=1), ORDER):
        session.send(encode(message))
    coordinator.sendall(session.take())
    sealed.turns_until(lambda: len(sealed.received) == 2)


@pytest.mark.parametrize(
    "answers",
    [
        lambda _: [encode(Welcome(epoch=1))],
        lambda cipher: [cipher.seal(encode(Welcome(epoch=1)))[:-1]],
        lambda cipher: [cipher.seal(encode(Welcome(epoch=1)))] * 2,
        lambda cipher: [cipher.seal(encode(it)) for it in (ORDER, Welcome(epoch=1))][::-1],
    ],
    ids=["in clear", "cut short", "repeated", "out of order"],
)
def test_a_changed_frame_closes_a_sealed_connection(
    sealed: Wire, answers: Callable[[Cipher], list[bytes]]
) -> None:
    sealed.link.connect()
    sealed.turns_until(lambda: not sealed.link._link._unsent)  # noqa: SLF001
    coordinator, session = agree(sealed)
    sealed.turns_until(lambda: sealed.link._link._session.is_open)  # noqa: SLF001
    collect(sealed, coordinator, session, 0)
    coordinator.sendall(b"".join(map(frame, answers(session.cipher))))
    sealed.turns_until(lambda: not sealed.link.is_open)
    assert Dismiss() not in sealed.received


def test_a_coordinator_without_the_token_is_not_believed(
    sealed: Wire, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed.link.connect()
    sealed.turns_until(lambda: not sealed.link._link._unsent)  # noqa: SLF001
    coordinator, _ = agree(sealed, token="another")  # noqa: S106  for a test
    coordinator.sendall(frame(encode(Welcome(epoch=1))))
    sealed.turns_until(lambda: not sealed.link.is_open)
    assert sealed.received == []
    assert "the other end has another token" in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer", [encode(Welcome(epoch=1)), b"", b"muster\0\1" + bytes(47), b"\xff" * 56]
)
def test_no_answer_in_clear_is_obeyed(sealed: Wire, answer: bytes) -> None:
    sealed.link.connect()
    sealed.accepts().sendall(frame(answer))
    sealed.turns_until(lambda: not sealed.link.is_open)
    assert sealed.received == []


def test_an_address_is_tried_again_after_a_pause(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.coordinator.link.RETRY_SECONDS", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    wire.is_published_at(port)
    if wire.link.connect():
        wire.turns_until(lambda: not wire.link.is_open)
    assert not wire.link.has_new_address, "a pause is kept"
    monkeypatch.setattr("worker.coordinator.link.RETRY_SECONDS", 0.0)
    wire.is_published_at(wire.address.port)
    assert wire.link.connect()
    wire.accepts()
    assert not wire.link.has_new_address, "it is connected"
    wire.link.close()
    assert wire.link.has_new_address
