"""Test hosts are apart from each other, fail on command, and leave nothing behind."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from muster.host.processes import descendants, identify, is_stopped
from tests.support.hosts import Host, hosts, needs_hosts

pytestmark = needs_hosts()

BOOT_ID, MACHINE_ID = "/proc/sys/kernel/random/boot_id", "/etc/machine-id"
DEADLINE_SECONDS = 60.0
SLEEP = ("sleep", "1000")

CALL = """
import socket, sys
connection = socket.create_connection(("host-1", int(sys.argv[1])))
sys.stdin.read()
"""

LEFT_ALONE = """
import sys
from pathlib import Path
from tests.support.hosts import hosts
with hosts(2, Path(sys.argv[1])) as made:
    made[0].start(["sleep", "1000"])
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with hosts(3, tmp_path_factory.mktemp("hosts")) as made:
        assert_delivered(made, (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
        yield made


def test_each_has_a_name_a_boot_and_a_machine_id(three: list[Host]) -> None:
    seen = [[host.run("hostname"), *identity(host)] for host in three]
    ours = [socket.gethostname(), Path(BOOT_ID).read_text(), Path(MACHINE_ID).read_text()]
    for values in zip(*seen, ours, strict=True):
        assert len(set(values)) == len(three) + 1


def test_none_sees_the_processes_of_another(three: list[Host]) -> None:
    process = three[0].start(SLEEP)
    assert three[0].processes() == [process.pid]
    commands = ("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "sleep 1000" in three[0].run(*commands)
    assert "sleep 1000" not in three[1].run(*commands)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def test_a_path_is_another_disk_on_each_or_shared(three: list[Host]) -> None:
    for host in three:
        host.run("sh", "-c", f"hostname > {host.local}/one; hostname >> {host.shared}/all")
    assert [(host.directory / "one").read_text() for host in three] == [
        f"{host.name}\n" for host in three
    ]
    assert (three[0].shared / "all").read_text() == "host-0\nhost-1\nhost-2\n"


def test_they_connect_to_each_other_by_name(three: list[Host]) -> None:
    with three[1].open_socket() as listener:
        listener.bind((three[1].address, 0))
        listener.listen()
        three[0].run(sys.executable, "-c", CALL, str(listener.getsockname()[1]))
        connection, (peer, _) = listener.accept()
        connection.close()
        assert peer == three[0].address


def test_a_one_way_cut_is_one_way(three: list[Host]) -> None:
    three[0].cut(three[1], one_way=True)
    assert_delivered(three, (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))


def test_a_cut_is_between_two_hosts(three: list[Host]) -> None:
    three[0].cut(three[1])
    assert_delivered(three, (0, 2), (1, 2), (2, 0), (2, 1))


def test_an_isolated_host_stays_so_when_it_boots(three: list[Host]) -> None:
    three[2].cut(*three[:2])
    three[2].power_off()
    three[2].power_on()
    assert_delivered(three, (0, 1), (1, 0))


def test_power_off_ends_everything_and_keeps_the_disk(three: list[Host]) -> None:
    host = three[2]
    boot, machine = identity(host)
    host.run("touch", f"{host.local}/kept", "/dev/shm/lost")  # noqa: S108  its own
    process = host.start(["sh", "-c", "setsid sleep 1000 & exec sleep 1000"])
    host.power_off()
    assert (identify(process.pid, or_zombie=True), host.processes()) == (None, [])
    assert process.wait() == -signal.SIGKILL
    host.power_on()
    next_boot, same_machine = identity(host)
    assert next_boot != boot
    assert same_machine == machine
    host.run("sh", "-c", f"test -e {host.local}/kept && test ! -e /dev/shm/lost")


def test_the_peer_of_a_host_without_power_receives_nothing(three: list[Host]) -> None:
    with three[1].open_socket() as listener:
        listener.bind((three[1].address, 0))
        listener.listen()
        reads, writes = os.pipe()
        with os.fdopen(reads, "rb") as stdin, os.fdopen(writes, "wb"):
            call = [sys.executable, "-c", CALL, str(listener.getsockname()[1])]
            three[2].start(call, stdin=stdin)
            connection, _ = listener.accept()
            three[2].power_off()
        with connection, pytest.raises(BlockingIOError):
            connection.recv(1, socket.MSG_DONTWAIT)
    three[2].power_on()


def test_a_frozen_host_goes_on_when_it_thaws(three: list[Host]) -> None:
    process = three[0].start(["sh", "-c", "sleep 0.01; exit 3"])
    three[0].freeze()
    assert all(map(is_stopped, three[0].processes()))
    three[0].thaw()
    assert process.wait() == 3


def test_a_program_that_is_missing_is_an_error(three: list[Host]) -> None:
    with pytest.raises(OSError, match="host-0 cannot start 'nonesuch'"):
        three[0].start(["nonesuch"])


@pytest.mark.parametrize("end", ["return", "SIGTERM", "SIGKILL"])
def test_nothing_is_left(tmp_path: Path, end: str) -> None:
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", LEFT_ALONE, str(tmp_path)]
    links = socket.if_nameindex()
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, cwd=Path.cwd()) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == b"up\n"
        left = [os.pidfd_open(pid) for pid in descendants(test.pid)]
        assert len(left) == 6  # that of the network, two of each host, and one that sleeps
        if end != "return":
            test.send_signal(signal.Signals[end])
        test.communicate()
    for fd in left:
        assert select.select([fd], [], [], DEADLINE_SECONDS)[0]
        os.close(fd)
    assert socket.if_nameindex() == links


def identity(host: Host) -> list[str]:
    return [host.run("cat", path) for path in (BOOT_ID, MACHINE_ID)]


def assert_delivered(made: list[Host], *expected: tuple[int, int]) -> None:
    """Check which hosts' datagrams arrive where, then let all arrive again."""
    numbers = range(len(made))
    pairs = {(one, other) for one in numbers for other in numbers if one != other}
    with ExitStack() as stack:
        sockets = [stack.enter_context(host.open_socket(socket.SOCK_DGRAM)) for host in made]
        for each, host in zip(sockets, made, strict=True):
            each.bind((host.address, 0))
            each.settimeout(DEADLINE_SECONDS)

        def send(said: bytes) -> None:
            for one, other in pairs:
                sockets[one].sendto(said, sockets[other].getsockname())

        def receive(number: int) -> tuple[tuple[int, int], bytes]:
            said, (sender, _) = sockets[number].recvfrom(10)
            return (next(host.number for host in made if host.address == sender), number), said

        send(b"first")
        receivers = [other for _, other in expected]
        assert {receive(other) for other in receivers} == {(pair, b"first") for pair in expected}
        for host in made:
            host.heal()
        # Whatever else had come would be read before this.
        send(b"last")
        assert {receive(other) for _, other in pairs} == {(pair, b"last") for pair in pairs}
