from pathlib import Path

from muster.contracts.settings.paths import JobFiles
from muster.runtime.agent_sockets import (
    is_replaced,
    newest_number,
    newest_socket,
)


def sockets(root: Path, *numbers: int) -> list[Path]:
    files = JobFiles(root)
    files.run.mkdir(parents=True, exist_ok=True)
    made = [files.agent_socket(number) for number in numbers]
    for path in made:
        path.touch()
    return made


def test_the_socket_with_the_highest_number_is_the_newest(tmp_path: Path) -> None:
    older, mine, newer = sockets(tmp_path, 3, 7, 10_000)
    assert newest_socket(mine) == newest_socket(older) == newer
    assert (is_replaced(mine), is_replaced(newer)) == (True, False)
    assert newest_number(mine) == 10_000


def test_an_agent_without_a_socket_yet_counts_too(tmp_path: Path) -> None:
    (older,) = sockets(tmp_path, 3)
    mine = older.with_name("agent.0007.sock")
    assert (newest_socket(mine), newest_number(mine)) == (mine, 7)
    assert newest_number(tmp_path / "nowhere" / "agent.0002.sock") == 2
