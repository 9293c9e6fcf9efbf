"""Real processes that copy a database: killed at any moment, and on a full disk."""

import resource
import socket
import subprocess
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from database.replication.copy import position_of
from database.replication.messages import Chunk, Follow, Image, Row, ToLeader, Unpacker, pack
from muster.contracts.position import Position
from muster.host.processes import module_command
from stress.copy_kills import run
from tests.support.copies import back_up, leading, open_leading


@pytest.mark.slow
def test_kills_lose_no_acknowledged_row(tmp_path: Path) -> None:
    assert run(tmp_path, kills=10, seed=1).faults == []


def follow(path: Path, *messages: Image | Chunk | Row, file_limit_bytes: int) -> tuple[int, str]:
    """Feed a follower whose files may have so many bytes; return its exit code and last line."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            module_command("database.replication", "follow", str(path)),
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
        )
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (file_limit_bytes, hard))
        theirs.close()
        assert isinstance(Unpacker(ToLeader).feed(ours.recv(1 << 16))[0], Follow)
        ours.sendall(b"".join(map(pack, messages)))
        ours.shutdown(socket.SHUT_WR)
        _, lines = process.communicate()
    return process.returncode, lines.splitlines()[-1]


def test_a_full_disk_ends_a_follower_with_a_sentence(tmp_path: Path) -> None:
    path, copy = tmp_path / "muster.db", tmp_path / "copy.db"
    leading(tmp_path)
    with closing(open_leading(path)):
        back_up(path, copy)
    data, before = copy.read_bytes(), position_of(copy)
    limit = len(data) + 8192
    large = Row(2, 1, True, b"\x90" + bytes(limit))  # noqa: FBT003
    twice = data + data
    image = [Image(len(twice), sha256(twice).hexdigest()), Chunk(twice)]
    for messages in ([large], image):
        code, line = follow(copy, *messages, file_limit_bytes=limit)
        assert (code, line.startswith(f"replication: {copy} cannot be")) == (1, True), line
        assert position_of(copy) == before
    code, _ = follow(copy, Row(2, 1, True, b"\x90"), file_limit_bytes=limit)  # noqa: FBT003
    after = position_of(copy)
    assert (code, isinstance(after, Position) and after.number) == (0, 2)
