"""What the coordinator decides in the histories of `histories/*.txt`."""

from pathlib import Path

import pytest

from tests.support.histories import History, histories

FOLDER = Path(__file__).parent / "histories"


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(history, id=f"{path.stem}: {history.title}")
        for path in sorted(FOLDER.glob("*.txt"))
        for history in histories(path)
    ],
)
def test_a_history_leads_to_its_decisions(history: History) -> None:
    assert "\n".join(history.replay()) == "\n".join(history.lines)
