"""A failed save raises and leaves the old checkpoint untouched."""

import errno

import numpy as np
import pytest

from muster.checkpoints import errors
from muster.checkpoints.errors import (
    LASTING,
    CheckpointError,
    CheckpointFailed,
    CheckpointNotWritable,
    UnsupportedState,
)
from muster.checkpoints.manifest import CheckpointName
from tests.support.checkpoint_ranks import Rank, position
from tests.support.crash_simulator import MemoryFileSystem

LOOP: list[object] = []
LOOP.append(LOOP)

UNSUPPORTED = {
    "an object array": {"a": np.array([object()])},
    "a structured array": {"a": np.zeros(2, dtype=[("x", "f4")])},
    "a big-endian array": {"a": np.zeros(2, dtype=">f4")},
    "a complex array": {"a": np.zeros(2, dtype=complex)},
    "text in an array": {"a": np.array(["a"])},
    "a masked array": {"a": np.ma.masked_array([1, 2], [True, False])},
    "an array below the top": {"a": {"b": np.zeros(2)}},
    "bytes": {"a": b"x"},
    "a set": {"a": {1}},
    "a key of another type": {"a": {1.5: 2}},
    "a name that is no string": {1: 2},
    "a reserved key": {"a": {"__float__": "nan"}},
    "a reserved name": {"__metadata__": np.zeros(2)},
    "half a surrogate pair": {"a": "\ud800"},
    "an int of ten thousand digits": {"a": 10**10_000},
    "too much for a manifest": {"a": "x" * (17 << 20)},
    "a function": {"a": len},
    "a list that contains itself": {"a": LOOP},
}


@pytest.mark.parametrize("bad", UNSUPPORTED.values(), ids=list(UNSUPPORTED))
def test_unsupported_state_is_refused_and_nothing_moves(
    bad: dict[str, object],
) -> None:
    rank = Rank()
    rank.save(1)
    before = rank.files.tree()
    with pytest.raises(UnsupportedState):
        rank.manager.save(2, position(2), bad)
    assert rank.files.tree() == before
    assert rank.restored() == CheckpointName(0, 1)


def test_unsupported_value_is_named_by_its_path() -> None:
    words = r"^state\['a'\]\['b'\]\[1\] is of the type object, "
    with pytest.raises(UnsupportedState, match=words):
        Rank().manager.save(1, position(1), {"a": {"b": [0, object()]}})


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_any_failing_operation_keeps_the_old_checkpoint(
    number: int,
) -> None:
    calm = Rank()
    calm.save(1, 2)
    start = len(calm.files.operations)
    calm.save(3)
    for failing in range(start, len(calm.files.operations)):
        files = MemoryFileSystem(errors={failing: number})
        rank = Rank(files)
        rank.save(1, 2)
        acknowledged = CheckpointName(0, 2)
        try:
            rank.save(3)
        except CheckpointFailed:
            pass
        else:
            # Only the deletion of an old checkpoint failed, with a warning, or LATEST could not be
            # read before it was replaced.
            acknowledged = CheckpointName(0, 3)
            assert rank.warnings or files.operations[failing].name == "read"
        assert no_descriptor_was_trusted_after_its_failure(files)
        assert Rank(files).restored() >= acknowledged
        # Later saves work again.
        rank.save(4)
        again = Rank(files)
        assert again.restored() == CheckpointName(0, 4)
        assert again.warnings == []
        rank.manager.close()
        assert not [name for name in rank.on_disk() if name.endswith(".tmp")] or rank.warnings


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_failed_first_save_can_be_retried(number: int) -> None:
    calm = Rank()
    calm.save(1)
    for failing in range(len(calm.files.operations)):
        files = MemoryFileSystem(errors={failing: number})
        rank = Rank(files)
        try:
            rank.save(1)
        except CheckpointError:
            assert rank.restored() in (None, CheckpointName(0, 1))
        rank.save(2)
        assert Rank(files).restored() == CheckpointName(0, 2)


def no_descriptor_was_trusted_after_its_failure(files: MemoryFileSystem) -> bool:
    broken = set()
    for operation in files.operations:
        if operation.name == "fsync" and operation.arguments[0] in broken:
            return False
        if operation.error is not None and operation.name in ("write", "fsync"):
            broken.add(operation.arguments[0])
    return True


def test_file_with_failed_fsync_is_removed() -> None:
    calm = Rank()
    calm.save(1)
    fsyncs = [n for n, call in enumerate(calm.files.operations) if call.name == "fsync"]
    files = MemoryFileSystem(errors={fsyncs[0]: errno.EIO})
    rank = Rank(files)
    with pytest.raises(CheckpointFailed):
        rank.save(1)
    assert rank.on_disk() == []
    rank.save(1)
    assert rank.restored() == CheckpointName(0, 1)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *LASTING])
def test_lasting_errors_are_told_from_passing_ones(number: int) -> None:
    files = MemoryFileSystem(errors=dict.fromkeys(range(100), number))
    kind = CheckpointNotWritable if number in LASTING else CheckpointFailed
    with pytest.raises(
        kind, match=r"^preparing to save checkpoints in /.+ failed: .+\. "
    ) as caught:
        Rank(files).save(1)
    assert caught.value.__cause__.errno == number


def test_error_tree_in_docstring_is_complete() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        assert not issubclass(kind, CheckpointError) or kind.__name__ in errors.__doc__


def test_short_writes_are_continued() -> None:
    rank = Rank(MemoryFileSystem(largest_write_bytes=13))
    rank.save(1)
    assert rank.restored() == CheckpointName(0, 1)
