"""Agents, one after the other, as a rank in this process sees them."""

import socket
import threading
from pathlib import Path

from muster.contracts.messages import RankMessage
from muster.contracts.wire import decode_rank_message
from muster.host.peers import short_socket_path
from muster.runtime.agent_client import AgentClient, AgentSocket

PATIENCE_SECONDS = 10.0


class Agents:
    """The current agent, and a rank that starts with the first one."""

    def __init__(self, directory: Path) -> None:
        # Longer than sun_path.
        self.path = directory / ("d" * 120) / "agent.0001.sock"
        self.path.parent.mkdir()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(PATIENCE_SECONDS)
        self.descriptor = theirs.detach()
        self.line = AgentSocket(self.descriptor, self.path)
        self.client = AgentClient(self.line)
        self.listener: socket.socket | None = None

    def dies(self) -> None:
        self.channel.close()
        if self.listener is not None:
            self.listener.close()

    def starts(self) -> None:
        """Listen as a new agent."""
        self.path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.settimeout(PATIENCE_SECONDS)
        with short_socket_path(self.path) as address:
            self.listener.bind(address)
        self.listener.listen()

    def accepts(self) -> None:
        self.channel, _ = self.listener.accept()
        self.channel.settimeout(PATIENCE_SECONDS)

    def receives(self, count: int) -> list[RankMessage]:
        return [decode_rank_message(self.channel.recv(1 << 16)) for _ in range(count)]

    def close(self) -> None:
        self.dies()
        for thread in threading.enumerate():
            if thread.name == "muster-heartbeat":  # stopped, perhaps still in its last round
                thread.join(PATIENCE_SECONDS)
        self.line.close()
