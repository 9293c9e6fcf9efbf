"""An agent with a minimal coordinator that starts ranks and waits for their exits."""

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec

from muster.contracts.messages.agent import RankExited, RankSpawned, Welcome
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.settings.names import PROCESS_TAG
from tests.support.agent_stage import TOKEN, Conversation, order_of
from tests.support.installation import without_ours

TIMEOUT_SECONDS = 30.0


class LoneAgent:
    """A real agent of a new job."""

    def __init__(self, root: Path) -> None:
        self.uid = uuid.uuid4().hex
        self.root = root / self.uid
        self.root.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(TIMEOUT_SECONDS)
            host, port = listener.getsockname()
            address = self.root / "coordinator.json"
            address.write_bytes(msgspec.json.encode(CoordinatorAddress(host=host, port=port)))
            self.process = self._start(address)
            connection, _ = listener.accept()
        self._agent = Conversation(connection, Welcome(epoch=1))

    def _start(self, address: Path) -> subprocess.Popen[bytes]:
        assignment = AgentAssignment(
            job_uid=self.uid,
            host="local",
            agent_number=1,
            token=TOKEN,
            job_root=str(self.root),
            address_file=str(address),
            is_managed=False,
            orphan_timeout_seconds=600.0,
            stop_grace_seconds=1.0,
            agent_heartbeat_seconds=0.2,
            max_log_bytes=1 << 20,
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker.agent"],
            stdin=subprocess.PIPE,
            env={**without_ours(os.environ), PROCESS_TAG: f"{self.uid}/agent"},
            start_new_session=True,
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(assignment))
        return process

    def start(self, rank: int, attempt: int, *command: str) -> int:
        """Start an attempt; return its pid."""
        self._agent.say(order_of(self.root, self.uid, command, rank=rank, attempt=attempt))
        return self._agent.receive_of(RankSpawned, rank).pid

    def await_exit(self) -> None:
        while not isinstance(message := self._agent.receive(), RankExited):
            assert message, "the agent hung up"

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._agent.close()
