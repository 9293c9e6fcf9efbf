"""The id of a node: made once, the same for every process, and read without cryptography."""

import hashlib
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
)

from muster.cluster.identity import node_id
from muster.contracts.agent import is_node_id
from muster.contracts.settings.paths import DataDir
from muster.host.private import UnusableDirectory

ASK = """
import sys
from pathlib import Path
from muster.cluster.identity import node_id
sys.stdin.readline()
print(node_id(Path(sys.argv[1])), "cryptography" in sys.modules)
"""

KEY_OF_ANOTHER_KIND = ec.generate_private_key(ec.SECP256R1()).private_bytes(
    Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()
)


def asking(file: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", ASK, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_id_is_a_digest_of_the_public_key(tmp_path: Path) -> None:
    file = tmp_path / "node.key"
    found = node_id(file)
    key = load_ssh_private_key(file.read_bytes(), None)
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    assert found == f"n-{hashlib.sha256(public).hexdigest()[:12]}"
    assert is_node_id(found)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [*tmp_path.iterdir()] == [file]
    assert node_id(file) == found != node_id(tmp_path / "other.key")


@pytest.mark.slow
def test_processes_that_start_at_once_are_one_node(tmp_path: Path) -> None:
    processes = [asking(tmp_path / "node.key") for _ in range(4)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    ids = {process.communicate()[0].split()[0] for process in processes}
    assert ids == {node_id(tmp_path / "node.key")}


def test_a_known_id_is_read_without_cryptography(tmp_path: Path) -> None:
    found = node_id(tmp_path / "node.key")
    assert asking(tmp_path / "node.key").communicate("\n")[0].split() == [found, "False"]


@pytest.mark.parametrize(
    "change",
    [
        lambda _: b"",
        lambda key: bytes(len(key)),
        lambda key: key[:-40],
        lambda _: KEY_OF_ANOTHER_KIND,
    ],
    ids=["empty", "zeros", "cut off", "another kind"],
)
def test_a_damaged_key_is_refused_and_kept(tmp_path: Path, change: object) -> None:
    file = tmp_path / "node.key"
    node_id(file)
    file.write_bytes(damaged := change(file.read_bytes()))
    with pytest.raises(UnusableDirectory, match=f"{file} is not the key of a node: restore it"):
        node_id(file)
    assert file.read_bytes() == damaged


def test_a_directory_without_room_for_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableDirectory, match=r"missing cannot hold the data"):
        node_id(tmp_path / "missing" / "node.key")


def test_a_run_is_on_the_node_of_its_data_directory(tmp_path: Path) -> None:
    files = DataDir(tmp_path)
    assert files.foreground("job").node_key == files.node_key == tmp_path / "node.key"
