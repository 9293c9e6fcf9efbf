"""A rank's connection to its agent, and to the next one after a takeover."""

import fcntl
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from muster.contracts.messages.rank import SAVED_LIMIT, Hello, Ready, Warned
from muster.runtime.agent_client import AgentClient, AgentSocket
from tests.support.agents import Agents
from tests.support.ranks import PATIENCE_SECONDS, Ear
from tests.support.stories import beat, saved

# The socket


@pytest.mark.parametrize("unread", [[], [b"never read"]])
def test_last_packets_of_a_dead_agent_are_received(agents: Agents, unread: list[bytes]) -> None:
    for packet in unread:
        agents.link.send(packet)
    agents.channel.send(b"last")
    assert not agents.link.is_broken
    agents.dies()
    assert agents.link.is_broken
    assert not agents.link.reconnect()
    agents.link.send(b"lost")
    assert agents.link.receive() == (b"last", [])
    assert agents.link.receive() is None


def test_a_reconnected_socket_keeps_its_descriptor_number(agents: Agents) -> None:
    descriptors = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
    agents.dies()
    agents.starts()
    socket.setdefaulttimeout(600.0)  # as a program may do
    try:
        assert agents.link.reconnect()
    finally:
        socket.setdefaulttimeout(None)
    agents.accepts()
    assert not agents.link.is_broken
    assert agents.link.receive() is None
    agents.channel.send(b"hello")
    assert agents.link.receive() == (b"hello", [])
    agents.link.send(b"answer")
    assert agents.channel.recv(100) == b"answer"
    agents.listener.close()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208  names are enough


@pytest.fixture
def program(agents: Agents) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection of the program's own under the inherited number, after closing everything."""
    number = agents.descriptor
    mine, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.dup2(mine.fileno(), number)
    mine.close()
    with socket.socket(fileno=number) as mine, peer:
        yield mine, peer


def test_a_programs_own_socket_under_our_number_is_not_touched(
    agents: Agents, program: tuple[socket.socket, socket.socket]
) -> None:
    mine, peer = program
    peer.send(b"for the program")
    agents.link.send(b"a heartbeat")
    assert agents.link.receive() is None
    assert not agents.link.wait_for_room(0.0)
    assert mine.recv(100, socket.MSG_DONTWAIT) == b"for the program"
    with pytest.raises(BlockingIOError):
        peer.recv(100, socket.MSG_DONTWAIT)


@pytest.mark.parametrize("peer_has_gone", [False, True])
def test_a_taken_number_is_not_replaced_by_a_connection_to_the_next_agent(
    agents: Agents, program: tuple[socket.socket, socket.socket], *, peer_has_gone: bool
) -> None:
    mine, peer = program
    if peer_has_gone:
        peer.close()
    before = os.fstat(mine.fileno())
    agents.voice.send(Hello())
    agents.starts()
    assert not agents.voice.ensure_agent()
    assert os.path.sameopenfile(mine.fileno(), agents.descriptor)
    assert os.fstat(mine.fileno()).st_ino == before.st_ino
    assert agents.link.is_broken
    assert agents.link.is_closed


@contextmanager
def limited_to(descriptors: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_number_over_the_limit_makes_it_continue_under_another(agents: Agents) -> None:
    """Agents have a higher limit than ranks, so an inherited number may be over the limit."""
    high = fcntl.fcntl(agents.descriptor, fcntl.F_DUPFD_CLOEXEC, 500)
    link = AgentSocket(high, agents.path)
    agents.link.close()
    agents.dies()
    agents.starts()
    with limited_to(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 0) + 50):
        assert link.reconnect()
    agents.accepts()
    link.send(b"here")
    assert agents.channel.recv(100) == b"here"
    link.close()


def test_without_an_address_there_is_no_reconnecting(ear: Ear) -> None:
    ear.hang_up()
    assert ear.link.is_broken
    assert not ear.link.reconnect()


def test_without_an_agent_nothing_is_broken_or_sent() -> None:
    link = AgentSocket(None)
    assert not link.is_broken
    assert link.receive() is None
    assert not link.wait_for_room(0.0)
    AgentClient(link).send(Hello())


def test_a_descriptor_that_a_launcher_has_closed_is_ignored() -> None:
    ours, theirs = socket.socketpair()
    closed = theirs.detach()
    ours.close()
    os.close(closed)
    AgentClient(AgentSocket(closed)).send(Hello())


def test_a_descriptor_that_is_a_file_by_now_is_not_written(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        AgentClient(AgentSocket(file.fileno())).send(Hello())
        file.write(b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


# Messages


def test_a_dead_agent_raises_nothing_and_no_sigpipe(ear: Ear) -> None:
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        ear.hang_up()
        for _ in range(3):
            ear.voice.send(Hello())
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_an_agent_that_does_not_read_blocks_nothing(ear: Ear) -> None:
    for _ in range(10_000):
        ear.voice.send(Warned(message="x" * 1000))
    received = ear.received()
    assert 0 < len(received) < 10_000, "what does not fit is dropped whole"
    assert set(received) == {Warned(message="x" * 1000)}


def test_the_next_agent_gets_every_message_that_still_holds(agents: Agents) -> None:
    for message in (Hello(), beat(step=1), Ready(port=1), saved(5), beat(step=2)):
        agents.voice.send(message)
    agents.dies()
    assert not agents.voice.ensure_agent()
    for message in (saved(10), beat(step=12), saved(15)):
        agents.voice.send(message)
    agents.starts()
    assert agents.voice.ensure_agent()
    agents.accepts()
    expected = [Hello(), Ready(port=1), beat(step=12), saved(5), saved(10), saved(15)]
    assert [agents.receive() for _ in range(6)] == expected
    assert agents.voice.ensure_agent()
    agents.voice.send(beat(step=20))
    assert agents.receive() == beat(step=20), "nothing is sent twice"


def test_more_saves_than_fit_into_the_socket_are_all_sent(agents: Agents) -> None:
    for step in range(2 * SAVED_LIMIT):
        agents.voice.send(saved(step))
    agents.dies()
    agents.starts()
    sending = threading.Thread(target=agents.voice.ensure_agent)
    sending.start()
    agents.accepts()
    received = [agents.receive() for _ in range(SAVED_LIMIT)]
    sending.join(PATIENCE_SECONDS)
    assert received == [saved(step) for step in range(SAVED_LIMIT, 2 * SAVED_LIMIT)]


# Replaced


def test_newer_socket_means_replaced_while_our_agent_lives(agents: Agents) -> None:
    assert not agents.voice.is_replaced
    agents.are_succeeded()
    assert agents.voice.is_replaced
    agents.dies()
    agents.path = agents.path.with_name("agent.0002.sock")
    agents.starts()
    assert not agents.voice.is_replaced
    assert agents.voice.ensure_agent()
    agents.accepts()
    assert not agents.voice.is_replaced
    agents.path.with_name("agent.0003.sock").touch()
    assert agents.voice.is_replaced


@pytest.mark.parametrize("name", ["agent.0000.sock", "agent.sock", "agent.0002.sock.tmp"])
def test_other_files_do_not_mean_replaced(agents: Agents, name: str) -> None:
    agents.path.with_name(name).touch()
    assert not agents.voice.is_replaced


def test_a_missing_directory_does_not_mean_replaced(agents: Agents) -> None:
    agents.path.parent.rmdir()
    assert not agents.voice.is_replaced
