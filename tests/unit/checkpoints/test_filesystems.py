"""The file system in memory keeps the promises of the real one: one test for both."""

import errno
import os
from pathlib import Path

import pytest

from muster.checkpoints.filesystem import FileSystem, LocalFileSystem
from muster.checkpoints.memory import MemoryFileSystem, Operation


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FileSystem, str]:
    if request.param == "local":
        return LocalFileSystem(), str(tmp_path)
    files = MemoryFileSystem()
    files.make_directory("/place")
    return files, "/place"


def put(files: FileSystem, path: str, content: bytes = b"content") -> None:
    descriptor = files.create(path)
    assert files.write(descriptor, content) == len(content)
    files.fsync(descriptor)
    files.close(descriptor)


def test_files_and_directories(place: tuple[FileSystem, str]) -> None:
    files, root = place
    files.make_directory(f"{root}/d")
    put(files, f"{root}/d/f")
    files.fsync_directory(f"{root}/d")
    assert files.is_directory(f"{root}/d")
    assert not files.is_directory(f"{root}/d/f")
    assert not files.is_directory(f"{root}/absent")
    assert files.list_directory(f"{root}/d") == ["f"]
    assert files.read(f"{root}/d/f", 7) == b"content"
    files.rename(f"{root}/d", f"{root}/e")
    assert files.read(f"{root}/e/f", 7) == b"content"
    files.remove_file(f"{root}/e/f")
    files.remove_directory(f"{root}/e")
    assert files.list_directory(root) == []


def test_a_file_replaces_a_file(place: tuple[FileSystem, str]) -> None:
    files, root = place
    put(files, f"{root}/old", b"old")
    put(files, f"{root}/new", b"new")
    files.rename(f"{root}/new", f"{root}/old")
    assert files.list_directory(root) == ["old"]
    assert files.read(f"{root}/old", 3) == b"new"


REFUSALS = {
    "a file is created once": (errno.EEXIST, lambda files, root: files.create(f"{root}/f")),
    "a directory is made once": (
        errno.EEXIST,
        lambda files, root: files.make_directory(f"{root}/d"),
    ),
    "a parent must be there": (errno.ENOENT, lambda files, root: files.create(f"{root}/x/f")),
    "a parent is no file": (errno.ENOTDIR, lambda files, root: files.create(f"{root}/f/g")),
    "what is absent is not read": (errno.ENOENT, lambda files, root: files.read(f"{root}/x", 9)),
    "what is too long is not read": (errno.EFBIG, lambda files, root: files.read(f"{root}/f", 6)),
    "a directory is not read": (errno.EINVAL, lambda files, root: files.read(f"{root}/d", 9)),
    "a full directory stays": (
        errno.ENOTEMPTY,
        lambda files, root: files.remove_directory(f"{root}/d"),
    ),
    "a directory replaces no full one": (
        errno.ENOTEMPTY,
        lambda files, root: files.rename(f"{root}/e", f"{root}/d"),
    ),
    "a directory replaces no file": (
        errno.ENOTDIR,
        lambda files, root: files.rename(f"{root}/e", f"{root}/f"),
    ),
    "what is absent is not listed": (
        errno.ENOENT,
        lambda files, root: files.list_directory(f"{root}/x"),
    ),
    "what is absent is not flushed": (
        errno.ENOENT,
        lambda files, root: files.fsync_directory(f"{root}/x"),
    ),
    "what is closed is not written": (errno.EBADF, lambda files, _root: files.write(10**6, b"x")),
}


@pytest.mark.parametrize(("number", "call"), REFUSALS.values(), ids=list(REFUSALS))
def test_refusals(place: tuple[FileSystem, str], number: int, call: object) -> None:
    files, root = place
    put(files, f"{root}/f")
    files.make_directory(f"{root}/d")
    files.make_directory(f"{root}/e")
    put(files, f"{root}/d/f")
    with pytest.raises(OSError, match="Errno") as refusal:
        call(files, root)
    assert refusal.value.errno == number
    assert sorted(files.list_directory(root)) == ["d", "e", "f"]


def test_the_real_one_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    files = LocalFileSystem()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=name):
            files.read(str(tmp_path / name), 100)
        with pytest.raises(FileExistsError):
            files.create(str(tmp_path / name))


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    files = LocalFileSystem()
    files.make_directory(str(tmp_path / "d"))
    files.close(files.create(str(tmp_path / "d" / "f")))
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "d" / "f").stat().st_mode & 0o777 == 0o600


def test_the_one_in_memory_remembers_and_replays() -> None:
    files = MemoryFileSystem(errors={1: errno.EIO}, largest_write_bytes=2)
    files.make_directory("/d")
    with pytest.raises(OSError, match="Input/output"):
        files.make_directory("/e")
    descriptor = files.create("/d/f")
    assert files.write(descriptor, b"abc") == 2
    assert files.operations == [
        Operation("make_directory", ("/d",)),
        Operation("make_directory", ("/e",), errno.EIO),
        Operation("create", ("/d/f",)),
        Operation("write", (descriptor, b"ab")),
    ]
    again = MemoryFileSystem()
    again.replay(files.operations)
    assert again.tree() == files.tree() == {"/d/": b"", "/d/f": b"ab"}
