import pytest

from muster.checkpoints.names import CheckpointName
from muster.checkpoints.retention import expendable

CASES = [
    # have, latest, trusted, keep_last, gone
    ({1, 2, 3}, 3, {3}, 1, [2, 1]),
    ({1, 2, 3, 4}, 4, {3, 4}, 2, [2, 1]),
    ({1, 2, 3, 4}, 4, {4}, 2, []),
    ({1, 2, 3, 4}, 4, {2, 4}, 2, [1]),
    ({1, 2, 3, 4}, 4, {3, 4}, 3, [1]),
    ({1, 2, 3, 4}, 4, {3, 4}, 9, []),
    ({1}, 1, {1}, 1, []),
    # A program that went back: LATEST stays, though others have later steps.
    ({2, 8, 9}, 2, {2, 8, 9}, 2, [8]),
    ({2, 8, 9}, 2, {2, 8, 9}, 1, [9, 8]),
]


@pytest.mark.parametrize(("have", "latest", "trusted", "keep_last", "gone"), CASES)
def test_what_may_go(
    have: set[int], latest: int, trusted: set[int], keep_last: int, gone: list[int]
) -> None:
    def named(steps: set[int]) -> set[CheckpointName]:
        return {CheckpointName(0, step) for step in steps}

    found = expendable(named(have), CheckpointName(0, latest), named(trusted), keep_last)
    assert [name.step for name in found] == gone
