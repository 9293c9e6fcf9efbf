"""The sender of logs and its coordinator as processes that are killed."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from muster.contracts.messages.agent import AgentHello, TerminateRank
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.messages.storage import StorageAssignment
from muster.contracts.messages.wire import encode
from muster.contracts.settings.paths import JobFiles
from muster.contracts.shards import Position
from muster.host.addresses import publish_address
from muster.host.processes import module_command
from muster.runtime.storage_client import RemoteCheckpoints, StorageConnection
from tests.support.installation import await_value, end_of
from tests.support.storage_processes import session_of
from worker.coordinator.log_sender import send_logs
from worker.ranks.log_index import LogIndex

HELLO = AgentHello(job_uid="uid", host="beta", agent_number=1, token="a token")  # noqa: S106  for a test
ORDER = TerminateRank(rank=7, attempt=0)
LINES = 20_000  # between two interruptions: several batches
ROUNDS = 6
STATE = {"weights": np.arange(1 << 20, dtype=np.float64)}


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        return int(found.getsockname()[1])


@dataclass
class Way:
    """Two directories, and the processes between them."""

    root: Path
    port: int = field(default_factory=free_port)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    sends_checkpoints: bool = False

    def files(self, name: str) -> JobFiles:
        return JobFiles(self.root / name / "jobs" / "a-job")

    @property
    def output(self) -> Path:
        return self.root / "output"

    @property
    def socket(self) -> Path:
        return self.root / "storage.sock"

    @property
    def address_file(self) -> Path:
        return self.root / "coordinator.json"

    @property
    def address(self) -> CoordinatorAddress:
        return CoordinatorAddress(host="127.0.0.1", port=self.port)

    def start(self, name: str) -> None:
        if name == "server":
            words = [f"127.0.0.1:{self.port}", msgspec.json.encode(HELLO).decode()]
            words += [encode(ORDER).hex(), str(self.files("coordinator").root)]
            argv = [sys.executable, "-m", "tests.support.agent_server", *words]
        else:
            argv = module_command("worker.storage" if name == "sender" else "worker.agent")
        with self.output.open("ab") as output:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=output, stderr=output)
        self.processes[name] = process
        assert process.stdin is not None
        if name == "agent":
            process.stdin.write(msgspec.json.encode(self.assignment()))
            process.stdin.close()
        if name == "sender":
            socket = str(self.socket) if self.sends_checkpoints else ""
            order = StorageAssignment(
                socket=socket, stop_grace_seconds=1.0, keys={}, agent=self.assignment()
            )
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            process.stdin.flush()

    def assignment(self) -> AgentAssignment:
        return AgentAssignment(
            job_uid=HELLO.job_uid,
            host=HELLO.host,
            agent_number=HELLO.agent_number,
            token=HELLO.token,
            job_root=str(self.files("away").root),
            address_file=str(self.address_file),
            coordinator=self.address,
            is_managed=False,
            orphan_timeout_seconds=600.0,
            stop_grace_seconds=1.0,
            agent_heartbeat_seconds=0.2,
            max_log_bytes=1 << 20,
            sends_checkpoints=self.sends_checkpoints,
        )

    def end(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        code = process.wait(20.0)
        process.communicate()
        return code

    def size_at_coordinator(self) -> int:
        log = self.files("coordinator").log(0, 0)
        return log.stat().st_size if log.exists() else -1


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Way]:
    way = Way(tmp_path)
    for name in ("coordinator", "away"):
        way.files(name).exits.mkdir(parents=True)
        way.files(name).owner.write_text(HELLO.job_uid)
    publish_address(way.address, way.address_file)
    yield way
    for name in [*way.processes]:
        way.end(name)


def test_nothing_is_lost_or_doubled_by_kills(way: Way) -> None:
    away, coordinator = way.files("away"), way.files("coordinator")
    index = LogIndex(away.log(0, 0), away.times(0, 0))
    for name in ("server", "sender"):
        way.start(name)
    with away.log(0, 0).open("a") as log:
        for number in range(ROUNDS):
            before = way.size_at_coordinator()
            log.writelines(f"{number} {line}\n" for line in range(LINES))
            log.flush()
            index.note(number)
            await_value(lambda: way.size_at_coordinator() > before, lambda: end_of(way.output))  # noqa: B023
            name = ("server", "sender")[number % 2]
            way.end(name)
            way.start(name)
    away.exit_record(0, 0).write_bytes(b"how it ended")
    await_value(coordinator.exit_record(0, 0).exists, lambda: end_of(way.output))
    assert way.end("sender", signal.SIGTERM) == 0, "everything is sent"
    for path in (JobFiles.log, JobFiles.times, JobFiles.exit_record):
        assert path(coordinator, 0, 0).read_bytes() == path(away, 0, 0).read_bytes()
    assert "drained" in way.output.read_text()


def test_a_sender_that_is_told_to_end_first_sends_all(way: Way) -> None:
    away, coordinator = way.files("away"), way.files("coordinator")
    index = LogIndex(away.log(0, 0), away.times(0, 0))
    for name in ("server", "sender"):
        way.start(name)
    await_value(coordinator.log(0, 0).exists, lambda: end_of(way.output))
    away.log(0, 0).write_text("the last line\n")
    index.note(1.0)
    assert way.end("sender", signal.SIGTERM) == 0
    assert coordinator.log(0, 0).read_text() == "the last line\n"


def test_no_log_is_sent_to_a_coordinator_that_is_here_now(way: Way) -> None:
    """It has the directory of the agent, and would refuse every connection."""
    publish_address(msgspec.structs.replace(way.address, number=(2, 0)), way.address_file)
    is_ending = threading.Event()
    is_ending.set()
    send_logs(way.assignment(), is_ending)  # returns, though nothing listens there


def test_all_links_leave_a_coordinator_that_was_replaced(way: Way) -> None:
    """Those of agent, logs and checkpoints. It is stopped, and not dead: connections stay open."""
    way.sends_checkpoints = True
    away, coordinator = way.files("away"), way.files("coordinator")
    index = LogIndex(away.log(0, 0), away.times(0, 0))
    for name in ("server", "agent"):
        way.start(name)
    session, warnings = session_of(coordinator.root / "checkpoints"), list[str]()
    connection = StorageConnection(away.storage_socket, session, warnings.append)
    with closing(RemoteCheckpoints(connection, warnings.append)) as rank, closing(connection):
        rank.claim()
        for step in (1, 2):
            await_value(
                lambda: way.output.read_text().count("\nconnected ") == step,  # noqa: B023
                lambda: end_of(way.output),
            )
            with away.log(0, 0).open("a") as log:
                log.write(f"to coordinator {step}\n")
            index.note(step)
            rank.save(step, Position(step=step), STATE | {"step": step}, print)
            rank.flush()
            size = away.log(0, 0).stat().st_size
            await_value(lambda: way.size_at_coordinator() == size, lambda: end_of(way.output))  # noqa: B023
            if step == 1:
                way.processes["stopped"] = way.processes.pop("server")
                way.processes["stopped"].send_signal(signal.SIGSTOP)
                way.port = free_port()
                way.start("server")
                publish_address(way.address, way.address_file)
        found = rank.restore()
    assert found is not None
    assert found.step == found.state["step"] == 2
    assert warnings == []


def test_a_sender_ends_with_its_agent(way: Way) -> None:
    way.start("sender")
    sender = way.processes.pop("sender")
    sender.communicate(timeout=60.0)
    assert sender.returncode == 1


def test_a_killed_helper_loses_no_line_and_no_checkpoint(way: Way) -> None:
    """One process sends both: what it has not acknowledged comes from the next one."""
    way.sends_checkpoints = True
    away, coordinator = way.files("away"), way.files("coordinator")
    for name in ("server", "sender"):
        way.start(name)
    index = LogIndex(away.log(0, 0), away.times(0, 0))
    warnings: list[str] = []
    session = session_of(coordinator.root / "checkpoints")
    connection = StorageConnection(way.socket, session, warnings.append)
    saved: list[int] = []
    with closing(RemoteCheckpoints(connection, warnings.append)) as rank, closing(connection):
        rank.claim()
        for step in range(1, ROUNDS):
            rank.save(step, Position(step=step), STATE | {"step": step}, saved.append)
            with away.log(0, 0).open("a") as log:
                log.writelines(f"{step} {line}\n" for line in range(LINES))
            index.note(step)
            assert way.end("sender") == -signal.SIGKILL
            way.start("sender")
            rank.flush()
        found = rank.restore()
    assert len(saved) == ROUNDS - 1
    assert found is not None
    assert found.step == found.state["step"] == ROUNDS - 1
    assert found.state["weights"].tobytes() == STATE["weights"].tobytes()
    assert warnings == []
    assert way.end("sender", signal.SIGTERM) == 0, "everything is sent"
    assert coordinator.log(0, 0).read_bytes() == away.log(0, 0).read_bytes()
