"""One rank in this process: its data, its settings, and the agent's end of its channel."""

import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from muster.contracts.messages.rank import RankMessage
from muster.contracts.messages.wire import decode_rank_message
from muster.contracts.settings.environ import RankSettings
from muster.run import Run
from muster.runtime.agent_client import AgentClient, AgentSocket

PATIENCE_SECONDS = 10.0


def write_contents(directory: Path, *contents: bytes) -> list[Path]:
    """Write a shard with each of the contents; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"shard_{number:05d}.txt" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def shard_paths(directory: Path) -> list[Path]:
    """Return the shards in a directory, in order."""
    return sorted(directory.glob("shard_*.txt"))


def write_shards(directory: Path, *shards: Sequence[object]) -> Path:
    """Write a data set whose samples are the values given."""
    encode = msgspec.json.encode
    write_contents(directory, *(b"".join(encode(one) + b"\n" for one in each) for each in shards))
    return directory


def settings_of(directory: Path, **names: object) -> RankSettings:
    """Return the settings of a rank with its data and its checkpoints below `directory`."""
    environ = {
        "DATASET_DIR": str(directory / "data"),
        "CHECKPOINT_DIR": str(directory / "checkpoints"),
        **{name: str(value) for name, value in names.items()},
    }
    return RankSettings.read(environ, world_size=1)


def run_of(directory: Path, voice: AgentClient | None = None, **names: object) -> Run:
    return Run(settings_of(directory, **names), voice or AgentClient(AgentSocket(None)))


class Ear:
    """The agent's end of a rank's channel."""

    def __init__(self, address: Path | None = None) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(PATIENCE_SECONDS)
        self.descriptor = theirs.detach()
        self.link = AgentSocket(self.descriptor, address)
        self.voice = AgentClient(self.link)

    def receive(self) -> RankMessage:
        """Wait for the next message."""
        return decode_rank_message(self.channel.recv(1 << 16))

    def received(self) -> list[RankMessage]:
        """Return what was said up to now."""
        messages = []
        self.channel.settimeout(0)
        try:
            while packet := self.channel.recv(1 << 16):
                messages.append(decode_rank_message(packet))
        except BlockingIOError:
            pass
        finally:
            self.channel.settimeout(PATIENCE_SECONDS)
        return messages

    def hang_up(self) -> None:
        self.channel.close()

    def close(self) -> None:
        self.channel.close()
        self.link.close()
