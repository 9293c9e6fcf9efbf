"""The file-system port, for the real and the recording one, and the durable sequences."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.local import (
    PIECE_BYTES,
    FileSystem,
    LocalFileSystem,
    ensure_directory,
    pieces,
    replace_file,
    write_file,
)
from muster.checkpoints.manifest import FileFacts
from tests.support.crash_simulator import CrashMode, MemoryFileSystem, Operation, crash_states


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


def test_create_list_read_and_remove(place: tuple[FileSystem, str]) -> None:
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


def test_rename_replaces_a_file(place: tuple[FileSystem, str]) -> None:
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
def test_invalid_operations_raise(place: tuple[FileSystem, str], number: int, call: object) -> None:
    files, root = place
    put(files, f"{root}/f")
    files.make_directory(f"{root}/d")
    files.make_directory(f"{root}/e")
    put(files, f"{root}/d/f")
    with pytest.raises(OSError, match="Errno") as refusal:
        call(files, root)
    assert refusal.value.errno == number
    assert sorted(files.list_directory(root)) == ["d", "e", "f"]


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


@pytest.mark.slow
@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 1000, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 3])))
def test_pieces_join_and_split_buffers(sizes: list[int]) -> None:
    buffers = [memoryview(bytes([index % 251]) * size) for index, size in enumerate(sizes)]
    found = list(pieces(buffers))
    assert b"".join(found) == b"".join(buffers)
    assert all(len(piece) <= PIECE_BYTES for piece in found)
    assert len(found) <= 2 * sum(sizes) // PIECE_BYTES + len(sizes) // 2 + 1


def test_write_file_returns_size_and_hash() -> None:
    files = MemoryFileSystem(largest_write_bytes=3)
    facts = write_file(files, "/f", [memoryview(b"hello "), memoryview(b"world")])
    assert facts == FileFacts(11, xxh3_64_hexdigest(b"hello world"))
    assert files.tree() == {"/f": b"hello world"}


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_failed_write_removes_the_file(failing: int) -> None:
    files = MemoryFileSystem(errors={failing: errno.ENOSPC})
    with pytest.raises(OSError, match="No space"):
        write_file(files, "/f", [memoryview(b"hello")])
    assert files.tree() == {}
    assert [call.name for call in files.operations].count("fsync") <= 1


def test_write_of_zero_bytes_raises() -> None:
    with pytest.raises(OSError, match="no more bytes"):
        write_file(MemoryFileSystem(largest_write_bytes=0), "/f", [memoryview(b"hello")])


@pytest.mark.parametrize("failing", range(6, 12))
def test_failed_replace_keeps_the_old_value(failing: int) -> None:
    files = MemoryFileSystem(errors={failing: errno.EIO})
    replace_file(files, "/f", b"old")
    with pytest.raises(OSError, match="Input/output"):
        replace_file(files, "/f", b"new")
    renamed = failing == 11
    assert files.tree() == {"/f": b"new" if renamed else b"old"}


def test_ensured_directory_survives_a_power_cut() -> None:
    files = MemoryFileSystem()
    ensure_directory(files, "/a/b/c")
    ensure_directory(files, "/a/b/c")
    for state in crash_states(files, CrashMode.ANY, limit=100):
        assert state.tree() == {"/a/": b"", "/a/b/": b"", "/a/b/c/": b""}


def test_existing_directory_is_flushed_again() -> None:
    files = MemoryFileSystem()
    files.make_directory("/a")
    ensure_directory(files, "/a/b")
    for state in crash_states(files, CrashMode.ANY, limit=100):
        assert state.tree() == {"/a/": b"", "/a/b/": b""}


def test_unreadable_parent_of_existing_directory_is_fine() -> None:
    files = MemoryFileSystem(errors={3: errno.EACCES})
    files.make_directory("/a")
    files.make_directory("/a/b")
    ensure_directory(files, "/a/b")
    assert files.operations[-1].error == errno.EACCES
