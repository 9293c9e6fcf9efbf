import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.durable import (
    PIECE_BYTES,
    FileFacts,
    ensure_directory,
    pieces,
    replace_file,
    write_file,
)
from muster.checkpoints.memory import MemoryFileSystem
from muster.checkpoints.power_cut import Mode, crash_states


@pytest.mark.slow
@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 1000, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 3])))
def test_pieces_are_the_same_bytes_in_few_bounded_portions(sizes: list[int]) -> None:
    buffers = [memoryview(bytes([index % 251]) * size) for index, size in enumerate(sizes)]
    found = list(pieces(buffers))
    assert b"".join(found) == b"".join(buffers)
    assert all(len(piece) <= PIECE_BYTES for piece in found)
    assert len(found) <= 2 * sum(sizes) // PIECE_BYTES + len(sizes) // 2 + 1


def test_a_file_is_hashed_while_it_is_written() -> None:
    files = MemoryFileSystem(largest_write_bytes=3)
    facts = write_file(files, "/f", [memoryview(b"hello "), memoryview(b"world")])
    assert facts == FileFacts(11, xxh3_64_hexdigest(b"hello world"))
    assert files.tree() == {"/f": b"hello world"}


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_a_file_that_could_not_be_made_durable_is_gone(failing: int) -> None:
    files = MemoryFileSystem(errors={failing: errno.ENOSPC})
    with pytest.raises(OSError, match="No space"):
        write_file(files, "/f", [memoryview(b"hello")])
    assert files.tree() == {}
    assert [call.name for call in files.operations].count("fsync") <= 1


def test_a_file_system_that_takes_no_bytes_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(OSError, match="no more bytes"):
        write_file(MemoryFileSystem(largest_write_bytes=0), "/f", [memoryview(b"hello")])


@pytest.mark.parametrize("failing", range(6, 12))
def test_a_replacement_that_fails_leaves_the_old_value(failing: int) -> None:
    files = MemoryFileSystem(errors={failing: errno.EIO})
    replace_file(files, "/f", b"old")
    with pytest.raises(OSError, match="Input/output"):
        replace_file(files, "/f", b"new")
    renamed = failing == 11
    assert files.tree() == {"/f": b"new" if renamed else b"old"}


def test_a_new_directory_survives_with_all_its_ancestors() -> None:
    files = MemoryFileSystem()
    ensure_directory(files, "/a/b/c")
    ensure_directory(files, "/a/b/c")
    for state in crash_states(files, Mode.ANY, limit=100):
        assert state.tree() == {"/a/": b"", "/a/b/": b"", "/a/b/c/": b""}


def test_a_directory_whose_maker_died_before_the_flush_is_flushed_by_the_next() -> None:
    files = MemoryFileSystem()
    files.make_directory("/a")
    ensure_directory(files, "/a/b")
    for state in crash_states(files, Mode.ANY, limit=100):
        assert state.tree() == {"/a/": b"", "/a/b/": b""}


def test_the_parent_of_a_found_directory_need_not_be_readable() -> None:
    files = MemoryFileSystem(errors={3: errno.EACCES})
    files.make_directory("/a")
    files.make_directory("/a/b")
    ensure_directory(files, "/a/b")
    assert files.operations[-1].error == errno.EACCES
