import errno

import pytest

from muster.checkpoints import errors
from muster.checkpoints.errors import (
    LASTING,
    CheckpointError,
    CheckpointFailed,
    CheckpointNotWritable,
    mapped,
)


def test_the_tree_is_drawn_whole() -> None:
    tree = errors.__doc__
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, CheckpointError):
            assert kind.__name__ in tree


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *LASTING])
def test_an_error_of_the_system_says_what_failed_where_and_what_to_do(number: int) -> None:
    expected = CheckpointNotWritable if number in LASTING else CheckpointFailed
    with (
        pytest.raises(expected, match=r"^saving in /place failed: .+\. .+") as caught,
        mapped("saving in", "/place"),
    ):
        raise OSError(number, "it broke")
    assert caught.value.__cause__.errno == number
