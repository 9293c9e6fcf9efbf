"""Networks of a household that link, meet and lose each other over real sockets."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from select import select

import pytest

from muster.links.blocking import BlockingLink
from muster.links.frames import frame
from muster.links.serving import listen
from muster.links.session import PROTOCOL, Caller
from muster.mesh.forming import SETTLE_SECONDS, Closed
from muster.mesh.identity import mesh_identity
from muster.mesh.messages import Hello, encode
from muster.mesh.network import Network
from tests.support import forwarder
from tests.support.installation import await_value
from tests.support.networks import (
    DEADLINE_SECONDS,
    SECRET,
    Home,
    await_link,
    find,
    gathering,
)

LOSS_SECONDS = 2.5
"""After which a peer that does not answer is lost."""

GARBAGE = {
    "a length of 2^63": (1 << 63).to_bytes(8, "little") * 8,
    "all ones": b"\xff" * 4096,
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": b"",
}


def form(networks: list[Network], group: str = "default") -> Closed:
    (closed,) = {
        future.result(DEADLINE_SECONDS)
        for future in [gathering(network).wait_for(group, len(networks)) for network in networks]
    }
    return closed


def test_all_who_wait_are_one_group(home: Home) -> None:
    networks = home.linked(4)
    closed = form(networks)
    assert set(closed.members) == {network.own_id for network in networks}
    orders = [gathering(network).members_of(closed) for network in networks]
    assert len({tuple(each.process_id for each in order) for order in orders}) == 1


def test_two_groups_never_mix(home: Home) -> None:
    networks = home.linked(4)
    ours = [gathering(network).wait_for("ours", 2) for network in networks[:2]]
    theirs = [gathering(network).wait_for("theirs", 2) for network in networks[2:]]
    for pair, futures in (networks[:2], ours), (networks[2:], theirs):
        for future in futures:
            members = future.result(DEADLINE_SECONDS).members
            assert set(members) == {network.own_id for network in pair}


def test_a_late_one_is_given_the_names(home: Home) -> None:
    *networks, late = home.linked(3)
    closed = form(networks)
    waiting = gathering(late).wait_for("default", 2)
    await_value(gathering(late).living_members, lambda: str(late.members()))
    assert {each.process_id for each in gathering(late).living_members()} == set(closed.members)
    assert not waiting.done()


def test_members_meet_anew_though_one_has_begun_already(home: Home) -> None:
    first, second = home.linked(2)
    closed = form([first, second])
    again = gathering(second).wait_for("default", None, closed.members)  # before `first` has looked
    await_link(first, second)
    gathering(first).members_of(closed)
    assert gathering(first).wait_for("default", None, closed.members).result(DEADLINE_SECONDS)
    assert again.result(DEADLINE_SECONDS).token != closed.token


def test_members_that_have_linked_late_meet_anew(home: Home) -> None:
    first, second, third = sorted((home.add() for _ in range(3)), key=lambda made: made.own_id)
    for network in second, third:
        find(first, network)
    closed = form([first, second, third])
    with pytest.raises(KeyError):
        gathering(second).members_of(closed)
    find(second, third)
    await_link(second, third)
    await_link(third, second)
    assert {each.process_id for each in gathering(second).members_of(closed)} == {*closed.members}
    assert gathering(second).departed(closed) == gathering(third).departed(closed) == set()
    first.close()
    again = gathering(second).wait_for("default", None, closed.members)
    with pytest.raises(TimeoutError):
        again.result(2 * SETTLE_SECONDS)  # `third` has not called yet
    await_value(lambda: gathering(third).departed(closed) == {first.own_id, second.own_id}, str)
    assert gathering(third).wait_for("default", None, closed.members).result(DEADLINE_SECONDS)
    assert {*again.result(DEADLINE_SECONDS).members} == {second.own_id, third.own_id}


def test_a_script_that_stops_waiting_delays_no_group(home: Home) -> None:
    networks = home.linked(3)
    gathering(networks[0]).wait_for("default", 3)
    gathering(networks[0]).stop_waiting()
    assert networks[0].own_id not in form(networks[1:]).members


@pytest.mark.parametrize(
    ("difference", "said"),
    [({"secret": bytes(31) + b"x"}, "another secret"), ({"cluster": "lab"}, "of the cluster")],
)
def test_another_household_is_refused(home: Home, difference: dict[str, bytes], said: str) -> None:
    own, other = home.add(), home.add(**difference)  # type: ignore[arg-type]
    find(own, other)
    await_value(lambda: own.warnings, lambda: "no warning")
    assert said in " ".join(own.warnings)
    assert own.members() == other.members() == []


def test_another_protocol_is_named(home: Home) -> None:
    own = home.add()
    with socket.create_server(("127.0.0.1", 0)) as server:
        own.find(server.getsockname()[:2])
        with server.accept()[0] as caller:
            caller.sendall(frame(b"muster\0" + bytes([PROTOCOL + 1])))
            await_value(lambda: own.warnings, lambda: "no warning")
    assert f"protocol {PROTOCOL + 1}" in " ".join(own.warnings)


def recorded_hello(network: Network) -> bytes:
    """Return the first bytes that a network sends to one that it calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        network.find(server.getsockname()[:2])
        with server.accept()[0] as caller:
            return caller.recv(4096)


def test_strangers_do_not_hinder_a_group(home: Home) -> None:
    networks = home.linked(3)
    hello = recorded_hello(networks[1])
    with ExitStack() as stack:
        for content in [*GARBAGE.values(), hello, hello[:20], hello[:-1] + b"x"] * 5:
            for network in networks:
                stranger = socket.create_connection(("127.0.0.1", network.port))
                stack.enter_context(stranger)
                stranger.sendall(content)
        closed = form(networks)
        assert set(closed.members) == {network.own_id for network in networks}
    assert all(len(network.members()) == 2 for network in networks)


def test_silent_connections_do_not_keep_others_out(home: Home) -> None:
    networks = home.linked(2)
    with ExitStack() as stack:
        for _ in range(300):
            address = ("127.0.0.1", networks[0].port)
            stack.enter_context(socket.create_connection(address))
        form(networks)


def test_fakes_do_not_keep_a_real_one_out(home: Home) -> None:
    own, other = home.add(), home.add()
    with socket.create_server(("", 0), backlog=2048) as silent:
        for number in range(1000):
            fake = f"127.1.{number // 250}.{1 + number % 250}"
            own.find((fake, silent.getsockname()[1]), f"p-{number}")
        find(own, other)
        await_link(own, other)


def test_a_link_is_called_again_once_the_listener_is_back(home: Home) -> None:
    own, other = home.add(), home.add()
    lent = own.lend_listener()
    find(other, own)
    assert select([lent], [], [], DEADLINE_SECONDS)[0]
    refused, _ = lent.accept()
    refused.close()
    lent.close()
    own.listen()
    await_link(other, own)


def test_a_child_keeps_nothing_of_its_parent(home: Home) -> None:
    own, other = home.linked(2)
    await_link(other, own)
    await_link(own, other)
    if (pid := os.fork()) == 0:
        while True:
            signal.pause()
    try:
        own.close()
        await_value(lambda: not other.members(), lambda: str(other.members()))
        listen("127.0.0.1", own.port).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_silent_link_beside_another_costs_no_word_and_no_peer(home: Home) -> None:
    own, other = home.add(), home.add(host="0.0.0.0")  # noqa: S104
    command = [sys.executable, forwarder.__file__, str(other.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as between:
        assert between.stdout is not None
        own.find(("127.0.0.1", int(between.stdout.readline())))
        await_link(own, other)
        own.find(("127.0.0.2", other.port))
        await_value(lambda: own.members()[0].address[0] == "127.0.0.2", str)
        between.send_signal(signal.SIGSTOP)
        waiting = [gathering(network).wait_for("default", 2) for network in (own, other)]
        with pytest.raises(TimeoutError):
            waiting[0].result(LOSS_SECONDS)
        assert own.gone == other.gone == set()
        between.kill()
    for future in waiting:
        assert future.result(DEADLINE_SECONDS)


def test_a_link_that_comes_by_way_of_another_machine_is_not_used(home: Home) -> None:
    own, other = home.add(), home.add()
    command = [sys.executable, forwarder.__file__, str(other.port), "127.0.0.9"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as between:
        assert between.stdout is not None
        own.find(("127.0.0.9", int(between.stdout.readline())))
        await_value(lambda: other.warnings or own.members(), str)
        between.kill()
    assert "127.0.0.9" in str(other.warnings)
    assert own.members() == other.members() == []


def test_an_older_hello_that_comes_later_is_ignored(home: Home, tmp_path: Path) -> None:
    own, other = home.add(), mesh_identity("home", tmp_path / "key", SECRET)
    with ExitStack() as stack:
        for turn in 1, 0:
            calling = socket.create_connection(("127.0.0.1", own.port))
            link = stack.enter_context(closing(BlockingLink(calling, Caller(other))))
            link.open()
            link.send(encode(Hello(host="other", port=1, turn=turn)))
            link.receive()
        assert [hello.turn for _, hello in own.hellos()] == [1]


def test_two_sizes_are_named(home: Home) -> None:
    networks = home.linked(2)
    for size, network in enumerate(networks, 2):
        gathering(network).wait_for("default", size)
    await_value(lambda: networks[0].warnings, lambda: "no warning")
    (warning,) = networks[0].warnings
    assert "asked for 3 in" in warning
    assert "this process for 2:" in warning


def test_one_that_closes_is_not_gone(home: Home) -> None:
    own, other = home.linked(2)
    await_link(own, other)
    other.close()
    await_value(lambda: not own.members(), lambda: str(own.members()))
    assert own.gone == set()


def test_nothing_is_left_of_a_network(tmp_path: Path) -> None:
    before = threading.active_count()
    with ExitStack() as ending:
        home = Home(tmp_path, ending)
        form(home.linked(2))
    assert threading.active_count() == before
