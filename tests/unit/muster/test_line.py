"""A rank's line to its agent, and to the one after that."""

import fcntl
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stories import beat, saved

from muster.contracts.encoding import decode_rank_message
from muster.contracts.messages import Hello, RankMessage, Ready
from muster.line import Line
from muster.peers import neighbour_of, short_address
from muster.voice import SAVED_LIMIT, Heart, Voice

PATIENCE_SECONDS = 10.0
OFTEN_SECONDS = 0.001


class Agents:
    """One agent after the other, and a rank that begins with the first."""

    def __init__(self, directory: Path) -> None:
        # Longer than an address of a socket may be.
        self.path = directory / ("d" * 120) / "agent.0001.sock"
        self.path.parent.mkdir()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(PATIENCE_SECONDS)
        self.descriptor = theirs.detach()
        self.line = Line(self.descriptor, self.path)
        self.voice = Voice(self.line)
        self.listener: socket.socket | None = None

    def dies(self) -> None:
        self.channel.close()
        if self.listener is not None:
            self.listener.close()

    def comes(self) -> None:
        """Listen as a new agent."""
        self.path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.settimeout(PATIENCE_SECONDS)
        with short_address(self.path) as address:
            self.listener.bind(address)
        self.listener.listen()

    def answers(self) -> None:
        self.channel, _ = self.listener.accept()
        self.channel.settimeout(PATIENCE_SECONDS)

    def hears(self, number: int) -> list[RankMessage]:
        return [decode_rank_message(self.channel.recv(1 << 16)) for _ in range(number)]

    def close(self) -> None:
        self.dies()
        for thread in threading.enumerate():
            if thread.name == "muster-heart":  # it was stopped, and may be on its last round
                thread.join(PATIENCE_SECONDS)
        self.line.close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    agents.close()


def test_a_line_is_broken_when_the_agent_is_gone_and_not_before(agents: Agents) -> None:
    assert not agents.line.is_broken
    agents.dies()
    assert agents.line.is_broken
    assert not agents.line.renew()
    agents.line.send(b"nobody hears it")
    assert agents.line.receive() is None


def test_what_the_last_agent_had_said_before_it_died_is_still_heard(agents: Agents) -> None:
    agents.channel.send(b"farewell")
    agents.dies()
    assert agents.line.receive() == (b"farewell", [])
    assert agents.line.receive() is None


def test_an_agent_that_dies_without_having_listened_is_no_error(agents: Agents) -> None:
    agents.line.send(b"never read")
    agents.dies()
    assert agents.line.receive() is None
    assert agents.line.is_broken


def test_a_renewed_line_works_both_ways_and_has_its_old_number(agents: Agents) -> None:
    descriptors = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208  names are enough
    agents.dies()
    agents.comes()
    assert agents.line.renew()
    agents.answers()
    assert not agents.line.is_broken
    assert neighbour_of(agents.channel).pid == os.getpid()
    agents.channel.send(b"hello")
    assert agents.line.receive() == (b"hello", [])
    assert agents.line.receive() is None
    agents.line.send(b"hello yourself")
    assert agents.channel.recv(100) == b"hello yourself"
    agents.listener.close()
    assert sorted(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208  names are enough


@pytest.fixture
def program(agents: Agents) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection of the program's own, under the number that was the line's: it closed all."""
    number = agents.descriptor
    mine, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.dup2(mine.fileno(), number)
    mine.close()
    with socket.socket(fileno=number) as mine, peer:
        yield mine, peer


def test_what_the_program_has_put_under_our_number_is_never_touched(
    agents: Agents, program: tuple[socket.socket, socket.socket]
) -> None:
    mine, peer = program
    peer.send(b"for the program")
    agents.line.send(b"a beat")
    assert agents.line.receive() is None
    assert not agents.line.await_room(0.0)
    assert mine.recv(100, socket.MSG_DONTWAIT) == b"for the program"
    with pytest.raises(BlockingIOError):
        peer.recv(100, socket.MSG_DONTWAIT)


@pytest.mark.parametrize("peer_has_gone", [False, True])
def test_a_line_whose_number_the_program_has_taken_goes_on_under_another(
    agents: Agents, program: tuple[socket.socket, socket.socket], *, peer_has_gone: bool
) -> None:
    mine, peer = program
    if peer_has_gone:
        peer.close()
    before = os.fstat(mine.fileno())
    agents.voice.say(Hello())
    agents.comes()
    assert agents.voice.find_agent()
    agents.channel.close()  # as an agent does that has been called anew
    agents.answers()
    assert agents.hears(1) == [Hello()]
    agents.channel.send(b"hello")
    assert agents.line.receive() == (b"hello", [])
    assert os.path.sameopenfile(mine.fileno(), agents.descriptor)
    assert os.fstat(mine.fileno()).st_ino == before.st_ino
    assert not agents.line.is_broken


@contextmanager
def limited_to(descriptors: int) -> Iterator[None]:
    """No number from this on can be had; those that are there stay."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def free_number() -> int:
    number = os.open("/dev/null", os.O_RDONLY)
    os.close(number)
    return number


def test_a_line_whose_number_is_over_the_limit_goes_on_under_another(agents: Agents) -> None:
    """Agents may have more descriptors than ranks, and give one under the number it has."""
    high = fcntl.fcntl(agents.descriptor, fcntl.F_DUPFD_CLOEXEC, 500)
    line = Line(high, agents.path)
    agents.line.close()
    agents.dies()
    agents.comes()
    with limited_to(free_number() + 50):
        assert line.renew()
    agents.answers()
    line.send(b"here")
    assert agents.channel.recv(100) == b"here"
    line.close()


def test_a_program_without_a_descriptor_left_calls_again_later(agents: Agents) -> None:
    agents.dies()
    agents.comes()
    with limited_to(free_number()):
        assert not agents.line.renew()
    assert agents.line.renew()


def test_no_line_waits_for_what_a_program_has_made_its_default(agents: Agents) -> None:
    socket.setdefaulttimeout(600.0)
    try:
        line = Line(os.dup(agents.descriptor), agents.path)
        assert line.receive() is None
    finally:
        socket.setdefaulttimeout(None)
    line.close()


def test_without_an_address_a_line_ends_with_its_agent() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line = Line(theirs.detach())
    ours.close()
    assert line.is_broken
    assert not line.can_be_renewed
    assert not line.renew()
    line.close()


def test_nobody_is_not_broken() -> None:
    line = Line(None)
    assert not line.is_broken
    assert not line.can_be_renewed
    assert line.receive() is None
    assert not line.await_room(0.0)


def test_the_next_agent_hears_everything_that_holds(agents: Agents) -> None:
    for message in (Hello(), beat(step=1), Ready(port=1), saved(5), beat(step=2)):
        agents.voice.say(message)
    agents.dies()
    assert not agents.voice.find_agent()
    for message in (saved(10), beat(step=12), saved(15)):
        agents.voice.say(message)
    agents.comes()
    assert agents.voice.find_agent()
    agents.answers()
    assert agents.hears(6) == [
        Hello(),
        Ready(port=1),
        beat(step=12),
        saved(5),
        saved(10),
        saved(15),
    ]
    assert agents.voice.find_agent()
    agents.voice.say(beat(step=20))
    assert agents.hears(1) == [beat(step=20)], "and nothing twice"


def test_so_many_checkpoints_that_they_do_not_fit_at_once_are_told_all_the_same(
    agents: Agents,
) -> None:
    for step in range(2 * SAVED_LIMIT):
        agents.voice.say(saved(step))
    agents.dies()
    agents.comes()
    finding = threading.Thread(target=agents.voice.find_agent)
    finding.start()
    agents.answers()
    heard = agents.hears(SAVED_LIMIT)
    finding.join(PATIENCE_SECONDS)
    assert heard == [saved(step) for step in range(SAVED_LIMIT, 2 * SAVED_LIMIT)]


def heart_of(agents: Agents, orphan_timeout_seconds: float, orphaned: threading.Event) -> Heart:
    return Heart(
        agents.voice,
        lambda: beat(step=7),
        heartbeat_seconds=OFTEN_SECONDS,
        orphan_timeout_seconds=orphan_timeout_seconds,
        on_orphaned=orphaned.set,
        on_replaced=lambda: None,
    )


def test_a_heart_finds_the_next_agent(agents: Agents) -> None:
    orphaned = threading.Event()
    agents.voice.say(Hello())
    heart = heart_of(agents, PATIENCE_SECONDS, orphaned)
    heart.start()
    agents.dies()
    agents.comes()
    agents.answers()
    assert agents.hears(2) == [Hello(), beat(step=7)]
    heart.stop()
    assert not orphaned.is_set()


def test_who_finds_no_agent_is_an_orphan_in_the_end(agents: Agents) -> None:
    orphaned = threading.Event()
    heart = heart_of(agents, 0.05, orphaned)
    heart.start()
    agents.dies()
    assert orphaned.wait(PATIENCE_SECONDS)
    heart.stop()  # at once: nobody is waited for any more


def test_the_last_word_waits_for_an_agent_that_takes_over(agents: Agents) -> None:
    agents.dies()
    stopping = threading.Thread(target=heart_of(agents, 60.0, threading.Event()).stop)
    stopping.start()
    agents.comes()
    agents.answers()
    assert agents.hears(1) == [beat(step=7)]
    stopping.join(PATIENCE_SECONDS)
    assert not stopping.is_alive()


def test_a_rank_whose_agent_lives_and_has_a_successor_is_nobodys(agents: Agents) -> None:
    assert not agents.voice.is_replaced
    agents.path.with_name("agent.0002.sock").touch()
    assert agents.voice.is_replaced


def test_a_rank_that_is_through_when_it_has_been_replaced_leaves_as_such(agents: Agents) -> None:
    """It was stopped behind its last step: the heart has no round left in which to notice."""
    replaced: list[str] = []
    heart = Heart(
        agents.voice,
        lambda: beat(step=7),
        heartbeat_seconds=600.0,
        orphan_timeout_seconds=600.0,
        on_orphaned=lambda: None,
        on_replaced=lambda: replaced.append("it leaves"),
    )
    agents.path.with_name("agent.0002.sock").touch()
    heart.stop()
    assert replaced == ["it leaves"]


def test_a_rank_whose_agent_has_died_waits_for_its_successor(agents: Agents) -> None:
    agents.dies()
    agents.path = agents.path.with_name("agent.0002.sock")
    agents.comes()
    assert not agents.voice.is_replaced
    assert agents.voice.find_agent()
    agents.answers()
    assert not agents.voice.is_replaced
    agents.path.with_name("agent.0003.sock").touch()
    assert agents.voice.is_replaced


@pytest.mark.parametrize("name", ["agent.0000.sock", "agent.sock", "agent.0002.sock.tmp"])
def test_what_is_no_later_agents_socket_replaces_nobody(agents: Agents, name: str) -> None:
    agents.path.with_name(name).touch()
    assert not agents.voice.is_replaced


def test_a_directory_that_is_gone_replaces_nobody(agents: Agents) -> None:
    agents.path.parent.rmdir()
    assert not agents.voice.is_replaced
