"""Which agent is the present one, by the names of sockets alone."""

from pathlib import Path

import pytest

from muster.contracts.layout import JobFiles
from muster.succession import GENERATION_MAX, is_succeeded, newest_generation, present


def sockets(root: Path, *generations: int) -> list[Path]:
    files = JobFiles(root)
    files.run.mkdir(parents=True, exist_ok=True)
    made = [files.agent_socket(generation) for generation in generations]
    for path in made:
        path.touch()
    return made


def test_the_highest_number_is_the_present_agent_whether_or_not_it_listens(tmp_path: Path) -> None:
    older, mine, newer = sockets(tmp_path, 3, 7, 10_000)
    assert present(mine) == present(older) == newer
    assert (is_succeeded(mine), is_succeeded(newer)) == (True, False)
    assert newest_generation(mine) == 10_000


def test_who_has_not_opened_a_socket_yet_counts_as_well(tmp_path: Path) -> None:
    (older,) = sockets(tmp_path, 3)
    mine = older.with_name("agent.0007.sock")
    assert (present(mine), newest_generation(mine)) == (mine, 7)
    assert newest_generation(tmp_path / "nowhere" / "agent.0002.sock") == 2


def test_the_last_number_that_is_believed_can_be_outnumbered(tmp_path: Path) -> None:
    mine, _ = sockets(tmp_path, 1, GENERATION_MAX - 1)
    assert newest_generation(mine) == GENERATION_MAX - 1
    assert not is_succeeded(mine.with_name(f"agent.{GENERATION_MAX}.sock"))


@pytest.mark.parametrize("generation", [GENERATION_MAX, 10**19 - 1])
def test_a_number_that_no_database_holds_is_no_agents(tmp_path: Path, generation: int) -> None:
    mine, _ = sockets(tmp_path, 1, generation)
    assert (newest_generation(mine), is_succeeded(mine)) == (1, False)
