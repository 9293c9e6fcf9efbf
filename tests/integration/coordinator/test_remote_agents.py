"""An agent and its coordinator on two hosts, with a network between them that loses frames."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from muster.contracts.messages.agent import AgentHello, StartRank, TerminateRank
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.messages.wire import encode
from muster.contracts.settings.names import PROCESS_TAG
from muster.host.addresses import publish_address
from muster.links.frames import frame
from muster.links.serving import PENDING_LIMIT
from tests.support.agent_stage import order_of
from tests.support.hosts import Host, Process, hosts, needs_hosts
from tests.support.installation import await_value, end_of, without_ours

pytestmark = needs_hosts()

PORT = 7000
SYN_SENT = f":{PORT:04X} 02 "  # what /proc/net/tcp shows of an attempt to connect
HELLO = AgentHello(job_uid="uid", host="beta", agent_number=1, token="a token")  # noqa: S106  for a test
NOTHING = TerminateRank(rank=7, attempt=0)


@dataclass
class Pair:
    """The host of the coordinator, and one that has an agent; what the coordinator has printed."""

    control: Host
    other: Host
    root: Path

    @property
    def printed(self) -> str:
        return self.control.log.read_text()

    def serve(self, order: StartRank | TerminateRank = NOTHING) -> Process:
        """Listen for the agent of the other host."""
        words = [f"{self.control.address}:{PORT}", msgspec.json.encode(HELLO).decode()]
        argv = [sys.executable, "-m", "tests.support.agent_server", *words, encode(order).hex()]
        server = self.control.start(argv, cwd=Path.cwd())
        self.await_words("listens")
        return server

    def start_agent(self, orphan_timeout_seconds: float = 600.0) -> None:
        assignment = AgentAssignment(
            job_uid=HELLO.job_uid,
            host=HELLO.host,
            agent_number=HELLO.agent_number,
            token=HELLO.token,
            job_root=str(self.other.local),
            address_file=str(self.other.local / "coordinator.json"),
            coordinator=CoordinatorAddress(host=self.control.address, port=PORT),
            is_managed=False,
            orphan_timeout_seconds=orphan_timeout_seconds,
            stop_grace_seconds=1.0,
            agent_heartbeat_seconds=0.2,
            max_log_bytes=1 << 20,
        )
        assert assignment.coordinator is not None
        publish_address(assignment.coordinator, self.other.directory / "coordinator.json")
        given = self.root / "assignment"
        given.write_bytes(msgspec.json.encode(assignment))
        environ = {**without_ours(os.environ), PROCESS_TAG: f"{HELLO.job_uid}/agent"}
        argv = [sys.executable, "-P", "-m", "muster", "worker.agent"]
        with given.open("rb") as stdin:
            self.other.start(argv, environ, cwd=Path.cwd(), stdin=stdin)

    def await_connected(self, count: int = 1) -> None:
        self.await_words(f" {self.other.name}\n", count)

    def await_words(self, words: str, count: int = 1) -> None:
        logs = [self.control.log, self.other.log]
        await_value(
            lambda: self.printed.count(words) >= count, lambda: "\n".join(map(end_of, logs))
        )


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with hosts(2, tmp_path) as (control, other):
        yield Pair(control, other, tmp_path)


def test_an_agent_of_another_host_runs_a_rank(pair: Pair) -> None:
    server = pair.serve(order_of(pair.other.local, HELLO.job_uid, ["hostname"]))
    pair.start_agent()
    pair.await_words("exit_code=0")
    machine, boot = (
        pair.other.run("cat", place).strip()
        for place in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id")
    )
    assert f"connected {machine} {boot} {pair.other.name}\n" in pair.printed
    server.send_signal(signal.SIGKILL)
    server.wait()
    pair.serve()
    pair.await_connected(2)  # its address file has not changed


def test_a_connection_that_is_not_sealed_is_closed(pair: Pair) -> None:
    pair.serve()
    with pair.other.open_socket() as stranger:
        stranger.connect((pair.control.address, PORT))
        stranger.sendall(frame(encode(HELLO)))  # even with the right token
        assert stranger.recv(1) == b""
    assert "connected" not in pair.printed


def test_silent_connections_keep_no_agent_out(pair: Pair) -> None:
    pair.serve()
    silent = [pair.other.open_socket() for _ in range(PENDING_LIMIT + 1)]
    for stranger in silent:
        stranger.connect((pair.control.address, PORT))
    assert silent[0].recv(1) == b"", "the oldest is closed"
    pair.start_agent()
    pair.await_connected()
    for stranger in silent:
        stranger.close()


def test_a_lease_ends_though_the_connection_is_open(pair: Pair) -> None:
    server = pair.serve(order_of(pair.other.local, HELLO.job_uid, ["sleep", "5"]))
    pair.start_agent(orphan_timeout_seconds=4.0)
    pair.await_words("exit_code=0")  # its lease was renewed
    server.send_signal(signal.SIGSTOP)
    await_value(lambda: not pair.other.processes(), lambda: end_of(pair.other.log))


def test_both_ends_notice_that_the_other_host_is_lost(pair: Pair) -> None:
    pair.serve()
    pair.start_agent()
    pair.await_connected()
    pair.control.cut(pair.other)
    pair.await_words("disconnected")
    await_value(
        lambda: SYN_SENT in pair.other.run("cat", "/proc/net/tcp"), lambda: "no new connection"
    )
    pair.control.heal()
    pair.await_connected(2)
