import errno

import pytest

from muster.checkpoints import errors
from muster.checkpoints.errors import (
    LASTING,
    CheckpointError,
    CheckpointFailed,
    CheckpointNotWritable,
    checkpoint_errors,
)


def test_error_tree_in_docstring_is_complete() -> None:
    tree = errors.__doc__
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, CheckpointError):
            assert kind.__name__ in tree


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *LASTING])
def test_os_error_becomes_checkpoint_error(number: int) -> None:
    expected = CheckpointNotWritable if number in LASTING else CheckpointFailed
    with (
        pytest.raises(expected, match=r"^saving in /place failed: .+\. .+") as caught,
        checkpoint_errors("saving in", "/place"),
    ):
        raise OSError(number, "it broke")
    assert caught.value.__cause__.errno == number
