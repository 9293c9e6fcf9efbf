"""An agent, and the coordinator that a test plays for it over a real socket."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coordinator.launchers.local import LocalLauncher
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.spec import JobSpec
from muster.contracts.messages.agent import (
    AgentHeartbeat,
    AgentMessage,
    CoordinatorMessage,
    RankSpawned,
    StartRank,
    Welcome,
)
from muster.contracts.messages.assignment import (
    AdoptedRank,
    AgentAssignment,
    CoordinatorAddress,
    VramNeed,
)
from muster.contracts.messages.wire import (
    ExitRecord,
    decode_agent_message,
    decode_exit_record,
    encode,
)
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.environ import Assignment, HostPlace, process_tag, rank_environment
from muster.contracts.settings.names import PROCESS_TAG
from muster.contracts.settings.paths import JobFiles
from muster.contracts.token import sha256_of
from muster.host.containment import tagged_processes
from muster.host.limits import ShellLimits
from muster.links.frames import CONTROL_FRAME_LIMIT_BYTES, frame
from muster.links.identity import job_identity
from muster.links.session import Answerer
from tests.support.installation import await_value, without_ours

DEADLINE_SECONDS = 60.0

AGENT = ("-m", "worker.agent")

AGENT_NUMBER = 7
"""Of every agent of a stage."""

TOKEN = "a token"  # noqa: S105  no secret: a test is the only one to be convinced


class Conversation:
    """One connection of the agent, as its coordinator sees it: that has proved itself."""

    def __init__(self, connection: socket.socket, *first_words: CoordinatorMessage) -> None:
        self._connection = connection
        self._connection.settimeout(DEADLINE_SECONDS)
        self._session = Answerer(
            lambda claim: job_identity(claim, sha256_of(TOKEN)), is_sealed=False
        )
        while not self._session.is_open:
            self._session.receive(connection.recv(self._session.frames.missing_bytes))
            connection.sendall(self._session.take())
        self._session.frames.limit_bytes = CONTROL_FRAME_LIMIT_BYTES
        self._received: list[AgentMessage] = []
        self.say(*first_words)

    def say(self, *messages: CoordinatorMessage) -> None:
        """Send messages at once: they come together."""
        self._connection.sendall(b"".join(frame(encode(message)) for message in messages))

    def receive(self) -> AgentMessage | None:
        """Return the next message that is no pulse; None once the agent has hung up."""
        while (message := self._receive_any()) and isinstance(message, AgentHeartbeat):
            pass
        return message

    def receive_pulse(self, *stopped: tuple[int, int]) -> None:
        """Wait for a pulse that says that just these stand still; what comes before is dropped."""
        while message := self._receive_any():
            if message == AgentHeartbeat(stopped=stopped):
                return
        raise AssertionError(f"the agent hung up and never said that {stopped} stand still")

    def _receive_any(self) -> AgentMessage | None:
        while not self._received:
            try:
                data = self._connection.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._received += map(decode_agent_message, self._session.receive(data))
        return self._received.pop(0)

    def receive_of(self, kind: type[AgentMessage], rank: int) -> AgentMessage:
        """Return the next message of this kind about `rank`; what comes before is dropped."""
        while message := self.receive():
            if isinstance(message, kind) and message.rank == rank:
                return message
        raise AssertionError(f"the agent hung up and never said {kind.__name__} of rank {rank}")

    def close(self) -> None:
        self._connection.close()


class Stage:
    """An agent, the address file it reads, and the sockets a coordinator would listen on."""

    def __init__(self, root: Path, host: str = LOCAL_HOST) -> None:
        self.root = root
        self.host = host
        self.uid = uuid.uuid4().hex
        self.files = JobFiles(root / "job")
        self.files.root.mkdir()  # as its coordinator has done
        self._address = root / "coordinator.json"
        self._listener: socket.socket | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._conversations: list[Conversation] = []

    def start_agent(  # noqa: PLR0913  what a test may set
        self,
        *,
        orphan_timeout_seconds: float = 600.0,
        stop_grace_seconds: float = 1.0,
        is_managed: bool = False,
        spare_ranks: int = 0,
        gpus_per_rank: int = 0,
        gpus_at_once: int = 0,
        vram: VramNeed | None = None,
        adopted: Sequence[AdoptedRank] = (),
        store_keys: dict[str, str] | None = None,
        log: int | None = None,
        program: Sequence[str] = AGENT,
    ) -> None:
        """Start an agent; the one before it, if any, must have been killed.

        `log` is the descriptor of what it writes to, that of the tests if there is none. `program`
        is what makes an interpreter the agent.
        """
        assignment = AgentAssignment(
            job_uid=self.uid,
            host=self.host,
            agent_number=AGENT_NUMBER,
            token=TOKEN,
            job_root=str(self.files.root),
            address_file=str(self._address),
            is_managed=is_managed,
            spare_ranks=spare_ranks,
            gpus_per_rank=gpus_per_rank,
            gpus_at_once=gpus_at_once,
            vram=vram,
            orphan_timeout_seconds=orphan_timeout_seconds,
            stop_grace_seconds=stop_grace_seconds,
            agent_heartbeat_seconds=0.2,
            max_log_bytes=1 << 20,
            adopted=tuple(adopted),
            store_keys=store_keys,
        )
        self._agent = subprocess.Popen(
            [sys.executable, "-P", *program],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**without_ours(os.environ), PROCESS_TAG: f"{self.uid}/agent"},
        )
        assert self._agent.stdin is not None
        with self._agent.stdin as pipe:
            pipe.write(msgspec.json.encode(assignment))

    def signal_agent(self, number: signal.Signals) -> None:
        assert self._agent is not None
        self._agent.send_signal(number)

    def kill_agent(self) -> None:
        assert self._agent is not None
        self._agent.kill()
        self._agent.wait()

    def meet(self, epoch: int = 1, *orders: CoordinatorMessage) -> Conversation:
        """Listen as a new coordinator, and return the conversation the agent begins."""
        if self._listener is not None:
            self._listener.close()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(DEADLINE_SECONDS)
        host, port = self._listener.getsockname()
        self.announce(CoordinatorAddress(host=host, port=port))
        connection, _ = self._listener.accept()
        conversation = Conversation(connection, Welcome(epoch=epoch), *orders)
        self._conversations.append(conversation)
        return conversation

    def announce(self, address: CoordinatorAddress) -> None:
        self._address.write_bytes(msgspec.json.encode(address))

    def meet_nobody(self) -> None:
        """Close the listening socket, as if the coordinator were gone."""
        assert self._listener is not None
        self._listener.close()

    def order(self, command: Sequence[str] | None, **how: object) -> StartRank:
        """Return the order to start a rank of this job, as `order_of` has it."""
        return order_of(self.root, self.uid, command, **how)

    def exit_code(self) -> int:
        """Wait for the agent's end."""
        assert self._agent is not None
        return self._agent.wait(DEADLINE_SECONDS)

    def record(self, rank: int, attempt: int) -> ExitRecord:
        content = self.files.exit_record(rank, attempt).read_bytes()
        record = decode_exit_record(content, None)
        assert record is not None
        return record

    def running(self, rank: int | None = None) -> list[ProcessRecord]:
        """Return what runs of this job, or of one of its ranks."""
        return tagged_processes(f"{self.uid}/" if rank is None else f"{self.uid}/{rank}/")

    def await_log(self, words: str, rank: int = 0) -> None:
        log = self.files.log(rank, 0)
        await_value(lambda: log.exists() and words in log.read_text(), lambda: f"no {words!r}")

    def close(self) -> None:
        for conversation in self._conversations:
            conversation.close()
        if self._listener is not None:
            self._listener.close()
        if self._agent is not None and self._agent.poll() is None:
            self._agent.kill()
            self._agent.wait()
        # What a coordinator does once an agent has ended, however it did.
        asyncio.run(LocalLauncher({}, ShellLimits(1024, 1024)).sweep(self.uid, ()))


def order_of(
    root: Path,
    uid: str,
    command: Sequence[str] | None,
    *,
    rank: int = 0,
    attempt: int = 0,
    place: HostPlace | None = None,
    **spec: object,
) -> StartRank:
    """Return the order to start a rank of a job that has its files in `root`."""
    assignment = Assignment(
        job_id="job",
        job_uid=uid,
        rank=rank,
        attempt=attempt,
        checkpoint_dir=root,
        dataset_dir=root / "shards",
        master_port=1,
        generation=attempt,
        place=place,
    )
    wanted = {"world_size": 4, "command": command and tuple(command), **spec}
    return StartRank(
        rank=rank,
        attempt=attempt,
        environment=rank_environment(JobSpec(**wanted), assignment),
        working_dir=str(root),
    )


def adopted(uid: str, spawned: RankSpawned) -> AdoptedRank:
    """Return the next agent's record of a rank."""
    return AdoptedRank(
        rank=spawned.rank,
        attempt=spawned.attempt,
        process=ProcessRecord(
            pid=spawned.pid,
            start_ticks=spawned.start_ticks,
            boot_id=spawned.boot_id,
            node=spawned.node,
            pid_namespace=spawned.pid_namespace,
        ),
        process_tag=process_tag(uid, spawned.rank, spawned.attempt),
    )
