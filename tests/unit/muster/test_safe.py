"""Secrets are read from where they are kept, and from nowhere else."""

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.contracts.secrets import SECRET_LIMIT_BYTES, SecretUnavailable
from muster.safe import InvalidSecret, Safe

VALUE = "correct horse battery staple"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data" / "secrets"


@pytest.fixture
def safe(directory: Path) -> Safe:
    safe = Safe(directory)
    safe.put("token", VALUE)
    return safe


def test_what_was_put_in_comes_out(safe: Safe, directory: Path) -> None:
    assert safe.read("token") == VALUE
    assert safe.names() == ["token"]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "token").stat().st_mode & 0o777 == 0o600


def test_one_newline_at_the_end_is_cut_and_no_other_byte(safe: Safe, directory: Path) -> None:
    (directory / "token").write_bytes(b" -----BEGIN\nkey\n-----END \n\n")
    assert safe.read("token") == " -----BEGIN\nkey\n-----END \n"


@pytest.mark.parametrize("text", [VALUE, f"{VALUE}\n", f"{VALUE}\n\n", "\n\n"])
def test_what_is_put_in_loses_no_more_than_one_newline(safe: Safe, text: str) -> None:
    safe.put("token", text)
    assert safe.read("token") == text.removesuffix("\n")


Use = Callable[[Safe], object]


@pytest.mark.parametrize(
    "use", [lambda safe: safe.put("other", VALUE), lambda safe: safe.remove("token")]
)
def test_what_somebody_left_who_was_killed_is_swept_up(
    safe: Safe, directory: Path, use: Use
) -> None:
    left = directory / "token.0123456789abcdef.tmp"
    left.write_text(VALUE)
    use(safe)
    assert not left.exists()


@pytest.mark.parametrize("name", ["by-hand.tmp", "0123456789abcdef.tmp", "a.0123456789ABCDEF.tmp"])
def test_what_a_person_puts_there_by_hand_is_not_swept_up(
    safe: Safe, directory: Path, name: str
) -> None:
    (directory / name).write_text(VALUE)
    safe.put("other", VALUE)
    assert (directory / name).exists()
    assert name not in safe.names()


def test_who_looks_removes_nothing(safe: Safe, directory: Path) -> None:
    left = directory / "token.0123456789abcdef.tmp"
    left.write_text(VALUE)
    assert safe.names() == ["token"]
    assert list(safe.faults()) == []
    assert left.exists()


def test_what_somebody_writes_just_now_is_left_alone(safe: Safe, directory: Path) -> None:
    unfinished = directory / "token.0123456789abcdef.tmp"
    unfinished.write_text(VALUE)
    writing = os.open(directory, os.O_RDONLY)
    fcntl.flock(writing, fcntl.LOCK_SH)
    try:
        safe.put("other", VALUE)
        assert safe.names() == ["other", "token"]
        assert unfinished.exists()
    finally:
        os.close(writing)


def test_a_new_value_takes_the_place_of_the_old_one(safe: Safe) -> None:
    safe.put("token", "another")
    assert safe.read("token") == "another"
    assert safe.names() == ["token"]


def test_a_directory_that_is_not_there_keeps_nothing(tmp_path: Path) -> None:
    assert Safe(tmp_path / "none").names() == []
    with pytest.raises(SecretUnavailable, match=r"file:token cannot be read: .* is not there"):
        Safe(tmp_path / "none").read("token")


def test_what_was_removed_is_gone(safe: Safe) -> None:
    safe.remove("token")
    assert safe.names() == []
    with pytest.raises(SecretUnavailable, match="is not in"):
        safe.remove("token")


Damage = Callable[[Path], object]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.chmod(0o640), "has mode 0640, which lets others in"),
        (lambda path: path.chmod(0o602), "has mode 0602"),
        (lambda path: path.parent.chmod(0o750), "has mode 0750"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"\n"), "is empty"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "is no text in UTF-8"),
        (lambda path: path.write_bytes(b"a\0b"), "holds a NUL"),
        (lambda path: path.write_bytes(b"x" * (SECRET_LIMIT_BYTES + 1)), "is longer than 65536"),
        (lambda path: (path.unlink(), path.mkdir(mode=0o700)), "is no file"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "is no file"),
        (lambda path: (path.unlink(), os.mknod(path, 0o600 | stat.S_IFSOCK)), "is no file"),
        (lambda path: path.unlink(), "is not there"),
    ],
)
def test_what_is_not_kept_as_a_secret_is_none(
    safe: Safe, directory: Path, damage: Damage, why: str
) -> None:
    damage(directory / "token")
    with pytest.raises(SecretUnavailable, match=why) as refused:
        safe.read("token")
    assert VALUE not in str(refused.value)


def test_a_link_is_not_followed(safe: Safe, directory: Path) -> None:
    elsewhere = directory.parent / "elsewhere"
    elsewhere.write_text("somebody else's")
    elsewhere.chmod(0o600)
    (directory / "link").symlink_to(elsewhere)
    with pytest.raises(SecretUnavailable, match="is a link"):
        safe.read("link")


def test_a_directory_that_is_a_link_is_not_followed(safe: Safe, directory: Path) -> None:
    moved = directory.with_name("moved")
    directory.rename(moved)
    directory.symlink_to(moved)
    with pytest.raises(SecretUnavailable):
        safe.read("token")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../token", "/token", "a/b", "a\0", "a\n", "a.tmp"]
)
def test_no_name_leads_out_of_the_directory(safe: Safe, directory: Path, name: str) -> None:
    with pytest.raises(InvalidSecret, match="is no name of a secret"):
        safe.put(name, VALUE)
    with pytest.raises(InvalidSecret, match="is no name of a secret"):
        safe.remove(name)
    with pytest.raises(SecretUnavailable, match="no name of one"):
        safe.read(name)
    assert [path.name for path in directory.iterdir()] == ["token"]


@pytest.mark.parametrize("text", ["", "\n", "a\0b", "\udcff", "x" * (SECRET_LIMIT_BYTES + 1)])
def test_what_no_rank_could_be_given_is_not_kept(safe: Safe, text: str) -> None:
    with pytest.raises(InvalidSecret, match="nothing is kept"):
        safe.put("token", text)
    assert safe.read("token") == VALUE
