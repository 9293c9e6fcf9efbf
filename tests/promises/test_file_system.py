"""The promises of the checkpoint port, kept by the machine's file system and the recording one."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from muster.checkpoints.local import FileSystem, LocalFileSystem
from tests.support.crash_simulator import MemoryFileSystem, Operation

Place = tuple[FileSystem, str]


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
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


def test_create_list_read_and_remove(place: Place) -> None:
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


def test_rename_replaces_a_file(place: Place) -> None:
    files, root = place
    put(files, f"{root}/old", b"old")
    put(files, f"{root}/new", b"new")
    files.rename(f"{root}/new", f"{root}/old")
    assert files.list_directory(root) == ["old"]
    assert files.read(f"{root}/old", 3) == b"new"


REFUSALS = {
    "create twice": (errno.EEXIST, "create", "f"),
    "make a directory twice": (errno.EEXIST, "make_directory", "d"),
    "create without a parent": (errno.ENOENT, "create", "x/f"),
    "create below a file": (errno.ENOTDIR, "create", "f/g"),
    "read nothing": (errno.ENOENT, "read", "x", 9),
    "read a longer file": (errno.EFBIG, "read", "f", 6),
    "read a directory": (errno.EINVAL, "read", "d", 9),
    "remove a full directory": (errno.ENOTEMPTY, "remove_directory", "d"),
    "replace a full directory": (errno.ENOTEMPTY, "rename", "e", "d"),
    "replace a file by a directory": (errno.ENOTDIR, "rename", "e", "f"),
    "list nothing": (errno.ENOENT, "list_directory", "x"),
    "flush nothing": (errno.ENOENT, "fsync_directory", "x"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=list(REFUSALS))
def test_invalid_operation_raises(place: Place, refusal: tuple[int, str, *tuple[Any, ...]]) -> None:
    files, root = place
    put(files, f"{root}/f")
    files.make_directory(f"{root}/d")
    files.make_directory(f"{root}/e")
    put(files, f"{root}/d/f")
    number, name, *arguments = refusal
    paths = [f"{root}/{each}" if isinstance(each, str) else each for each in arguments]
    with pytest.raises(OSError, match="Errno") as caught:
        getattr(files, name)(*paths)
    assert caught.value.errno == number
    assert sorted(files.list_directory(root)) == ["d", "e", "f"]


def test_closed_descriptor_is_refused(place: Place) -> None:
    with pytest.raises(OSError, match="Errno") as caught:
        place[0].write(10**6, b"x")
    assert caught.value.errno == errno.EBADF


def test_local_file_system_refuses_links_and_pipes(tmp_path: Path) -> None:
    files = LocalFileSystem()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=name):
            files.read(str(tmp_path / name), 100)
        with pytest.raises(FileExistsError):
            files.create(str(tmp_path / name))


def test_files_are_private_to_the_user(tmp_path: Path) -> None:
    files = LocalFileSystem()
    files.make_directory(str(tmp_path / "d"))
    files.close(files.create(str(tmp_path / "d" / "f")))
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "d" / "f").stat().st_mode & 0o777 == 0o600


def test_memory_file_system_records_and_replays() -> None:
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
