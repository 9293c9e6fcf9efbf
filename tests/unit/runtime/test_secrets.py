import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.contracts.job.secrets import SECRET_LIMIT_BYTES, SecretUnavailable
from muster.runtime.secrets import InvalidSecret, SecretStore

VALUE = "correct horse battery staple"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data" / "secrets"


@pytest.fixture
def store(directory: Path) -> SecretStore:
    store = SecretStore(directory)
    store.put("token", VALUE)
    return store


def test_a_stored_secret_is_read_back(store: SecretStore, directory: Path) -> None:
    assert store.read("token") == VALUE
    assert store.names() == ["token"]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", [VALUE, f"{VALUE}\n", f"{VALUE}\n\n", "\n\n"])
def test_only_one_trailing_newline_of_a_value_is_removed(store: SecretStore, text: str) -> None:
    store.put("token", text)
    assert store.read("token") == text.removesuffix("\n")


def test_a_new_value_replaces_the_old_one(store: SecretStore) -> None:
    store.put("token", "another")
    assert store.read("token") == "another"
    assert store.names() == ["token"]


def test_a_missing_directory_holds_no_secrets(tmp_path: Path) -> None:
    assert SecretStore(tmp_path / "none").names() == []
    with pytest.raises(SecretUnavailable, match=r"file:token cannot be read: .* is missing"):
        SecretStore(tmp_path / "none").read("token")


def test_a_removed_secret_is_gone_with_its_unfinished_files(
    store: SecretStore, directory: Path
) -> None:
    left = [directory / f"{name}.0123456789abcdef.tmp" for name in ("token", "tokens")]
    for path in left:
        path.write_text("of a command that was killed")
    assert store.names() == ["token"]
    store.remove("token")
    assert store.names() == []
    assert [path.exists() for path in left] == [False, True]
    with pytest.raises(SecretUnavailable, match="is not in"):
        store.remove("token")


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.chmod(0o640), "has mode 0640, so other users"),
        (lambda path: path.chmod(0o602), "has mode 0602"),
        (lambda path: path.parent.chmod(0o750), "has mode 0750"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"\n"), "is empty"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is not UTF-8 text"),
        (lambda path: path.write_bytes(b"a\0b"), "contains a NUL"),
        (lambda path: path.write_bytes(b"x" * (SECRET_LIMIT_BYTES + 1)), "is longer than 65536"),
        (lambda path: (path.unlink(), path.mkdir(mode=0o700)), "not a regular file"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "not a regular file"),
        (
            lambda path: (path.unlink(), os.mknod(path, 0o600 | stat.S_IFSOCK)),
            "not a regular file",
        ),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.symlink_to(path.rename(path.with_name("moved"))), "a symbolic link"),
        (
            lambda path: path.parent.symlink_to(path.parent.rename(path.parent.with_name("moved"))),
            "cannot be read",
        ),
    ],
)
def test_an_unusable_file_is_refused(
    store: SecretStore, directory: Path, damage: Damage, why: str
) -> None:
    damage(directory / "token")
    with pytest.raises(SecretUnavailable, match=why) as refused:
        store.read("token")
    assert VALUE not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../token", "/token", "a/b", "a\0", "a\n", "a.tmp"]
)
def test_a_name_cannot_leave_the_directory(store: SecretStore, directory: Path, name: str) -> None:
    with pytest.raises(InvalidSecret, match="cannot be the name of a secret"):
        store.put(name, VALUE)
    with pytest.raises(InvalidSecret, match="cannot be the name of a secret"):
        store.remove(name)
    with pytest.raises(SecretUnavailable, match="is not the name of a secret"):
        store.read(name)
    assert [path.name for path in directory.iterdir()] == ["token"]


@pytest.mark.parametrize("text", ["", "\n", "a\0b", "\udcff", "x" * (SECRET_LIMIT_BYTES + 1)])
def test_a_value_that_no_variable_can_hold_is_refused(store: SecretStore, text: str) -> None:
    with pytest.raises(InvalidSecret, match="not stored"):
        store.put("token", text)
    assert store.read("token") == VALUE
