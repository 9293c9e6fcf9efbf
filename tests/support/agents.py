"""Agents, one after the other, as a rank in this process sees them."""

import socket
import threading
from pathlib import Path

from muster.host.peers import short_socket_path
from tests.support.ranks import PATIENCE_SECONDS, Ear


class Agents(Ear):
    """The current agent, and a rank that starts with the first one."""

    def __init__(self, directory: Path) -> None:
        # Longer than sun_path.
        self.path = directory / ("d" * 120) / "agent.0001.sock"
        self.path.parent.mkdir()
        super().__init__(self.path)
        self.listener: socket.socket | None = None

    def dies(self) -> None:
        self.hang_up()
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

    def are_succeeded(self) -> None:
        """Leave the sign that a newer agent has started."""
        self.path.with_name("agent.0002.sock").touch()

    def close(self) -> None:
        self.dies()
        for thread in threading.enumerate():
            if thread.name == "muster-heartbeat":  # stopped, perhaps still in its last round
                thread.join(PATIENCE_SECONDS)
        self.link.close()
