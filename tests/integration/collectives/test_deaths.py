"""A rank that is killed ends every wait of the others, also in real processes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from muster.collectives import SharedMemoryBackend, TcpBackend, all_reduce
from muster.collectives.backend import Backend
from muster.collectives.errors import ChannelClosed
from muster.host.ports import free_port

WAITING_RANK = """
import sys
from muster.collectives import SharedMemoryBackend, TcpBackend
kind = TcpBackend if ":" in sys.argv[1] else SharedMemoryBackend
kind.connect(sys.argv[1], 1, 2).recv(0, 1)
"""

WAITS: dict[str, Callable[[Backend], object]] = {
    "barrier": lambda backend: backend.barrier(),
    "receive": lambda backend: backend.recv(1, 1),
    "all-reduce": lambda backend: all_reduce(backend, np.ones(5)),
}


@pytest.mark.parametrize("kind", [SharedMemoryBackend, TcpBackend])
@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_rank_ends_a_wait(kind: type[TcpBackend], wait: str, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}" if kind is TcpBackend else str(tmp_path / "ranks")
    with subprocess.Popen([sys.executable, "-c", WAITING_RANK, address]) as other:
        backend = kind.connect(address, 0, 2)
        other.kill()
        with pytest.raises(ChannelClosed, match="rank 1"):
            WAITS[wait](backend)
        backend.close()
