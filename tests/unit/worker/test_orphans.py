from collections.abc import Callable

import pytest
from scarcity import no_descriptors

from worker.orphans import end_strangers


class OneLook:
    """Patience for one look, and what it has found."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def outlast(self, look: Callable[[], int]) -> int:
        self.found.append(look())
        return self.found[-1]


@pytest.mark.parametrize("spare", range(4))
def test_strangers_that_cannot_be_looked_for_may_be_there(
    monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """Looked for in blindness only: else it would be the processes of other tests that end."""
    patience = OneLook()
    monkeypatch.setattr("worker.orphans.STRANGERS_PATIENCE", patience)
    with no_descriptors(but=spare):
        end_strangers()
    assert patience.found == [1]
