"""The durable sequences, on the recording file system."""

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.local import (
    PIECE_BYTES,
    ensure_directory,
    pieces,
    replace_file,
    write_file,
)
from muster.checkpoints.manifest import FileFacts
from tests.support.crash_simulator import CrashMode, MemoryFileSystem, crash_states


@pytest.mark.slow
@settings(derandomize=True, max_examples=50)
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


@pytest.mark.parametrize("existing", [[], ["/a"]])
def test_ensured_directory_survives_a_power_cut(existing: list[str]) -> None:
    files = MemoryFileSystem()
    for path in existing:
        files.make_directory(path)
    ensure_directory(files, "/a/b/c")
    ensure_directory(files, "/a/b/c")
    for state in crash_states(files, CrashMode.ANY, limit=100):
        assert state.tree() == {"/a/": b"", "/a/b/": b"", "/a/b/c/": b""}


def test_unreadable_parent_of_existing_directory_is_fine() -> None:
    files = MemoryFileSystem(errors={3: errno.EACCES})
    files.make_directory("/a")
    files.make_directory("/a/b")
    ensure_directory(files, "/a/b")
    assert files.operations[-1].error == errno.EACCES
