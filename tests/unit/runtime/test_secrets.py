import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.contracts.secrets import SECRET_LIMIT_BYTES, SecretUnavailable
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


def test_only_one_trailing_newline_of_a_file_is_removed(
    store: SecretStore, directory: Path
) -> None:
    (directory / "token").write_bytes(b" -----BEGIN\nkey\n-----END \n\n")
    assert store.read("token") == " -----BEGIN\nkey\n-----END \n"


@pytest.mark.parametrize("text", [VALUE, f"{VALUE}\n", f"{VALUE}\n\n", "\n\n"])
def test_only_one_trailing_newline_of_a_value_is_removed(store: SecretStore, text: str) -> None:
    store.put("token", text)
    assert store.read("token") == text.removesuffix("\n")


Use = Callable[[SecretStore], object]


@pytest.mark.parametrize(
    "use", [lambda store: store.put("other", VALUE), lambda store: store.remove("token")]
)
def test_temporary_files_of_killed_writers_are_removed(
    store: SecretStore, directory: Path, use: Use
) -> None:
    left = directory / "token.0123456789abcdef.tmp"
    left.write_text(VALUE)
    use(store)
    assert not left.exists()


@pytest.mark.parametrize("name", ["by-hand.tmp", "0123456789abcdef.tmp", "a.0123456789ABCDEF.tmp"])
def test_other_files_in_the_directory_are_kept(
    store: SecretStore, directory: Path, name: str
) -> None:
    (directory / name).write_text(VALUE)
    store.put("other", VALUE)
    assert (directory / name).exists()
    assert name not in store.names()


def test_reading_removes_nothing(store: SecretStore, directory: Path) -> None:
    left = directory / "token.0123456789abcdef.tmp"
    left.write_text(VALUE)
    assert store.names() == ["token"]
    assert list(store.faults()) == []
    assert left.exists()


def test_a_running_writers_temporary_file_is_kept(store: SecretStore, directory: Path) -> None:
    unfinished = directory / "token.0123456789abcdef.tmp"
    unfinished.write_text(VALUE)
    writing = os.open(directory, os.O_RDONLY)
    fcntl.flock(writing, fcntl.LOCK_SH)
    try:
        store.put("other", VALUE)
        assert store.names() == ["other", "token"]
        assert unfinished.exists()
    finally:
        os.close(writing)


def test_a_new_value_replaces_the_old_one(store: SecretStore) -> None:
    store.put("token", "another")
    assert store.read("token") == "another"
    assert store.names() == ["token"]


def test_a_missing_directory_holds_no_secrets(tmp_path: Path) -> None:
    assert SecretStore(tmp_path / "none").names() == []
    with pytest.raises(SecretUnavailable, match=r"file:token cannot be read: .* is missing"):
        SecretStore(tmp_path / "none").read("token")


def test_a_removed_secret_is_gone(store: SecretStore) -> None:
    store.remove("token")
    assert store.names() == []
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
    ],
)
def test_an_unusable_file_is_refused(
    store: SecretStore, directory: Path, damage: Damage, why: str
) -> None:
    damage(directory / "token")
    with pytest.raises(SecretUnavailable, match=why) as refused:
        store.read("token")
    assert VALUE not in str(refused.value)


def test_a_symbolic_link_is_not_followed(store: SecretStore, directory: Path) -> None:
    elsewhere = directory.parent / "elsewhere"
    elsewhere.write_text("of another user")
    elsewhere.chmod(0o600)
    (directory / "link").symlink_to(elsewhere)
    with pytest.raises(SecretUnavailable, match="is a symbolic link"):
        store.read("link")


def test_a_linked_directory_is_not_followed(store: SecretStore, directory: Path) -> None:
    moved = directory.with_name("moved")
    directory.rename(moved)
    directory.symlink_to(moved)
    with pytest.raises(SecretUnavailable):
        store.read("token")


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
