import signal
import subprocess
from uuid import uuid4

import pytest
from enclosures import enclosed

from muster import containment
from muster.brand import can_brand
from muster.cells import cell_of, cells_of_job, clear_cell
from muster.containment import end_incarnation
from muster.contracts.environ import MARK


def ends(mark: str) -> bool:
    """Return whether it comes to an end; once may not be enough on a busy machine."""
    return any(end_incarnation(mark) for _ in range(100))


def test_what_is_enclosed_is_ended_and_its_neighbour_is_not() -> None:
    uid = uuid4().hex
    with enclosed(f"{uid}/1/0") as process, enclosed(f"{uid}/1/1") as neighbour:
        assert ends(f"{uid}/1/0")
        assert process.wait() == -signal.SIGKILL
        assert neighbour.poll() is None
        assert ends(f"{uid}/1/1")
        assert neighbour.wait() == -signal.SIGKILL
    assert list(cells_of_job(uid)) == []


def test_where_nothing_was_enclosed_there_is_nothing_to_end() -> None:
    assert end_incarnation(f"{uuid4().hex}/0/0")


def test_a_copy_of_an_environment_is_no_rank_unless_there_is_nothing_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = f"{uuid4().hex}/0/0"
    with subprocess.Popen(["/bin/sleep", "600"], env={MARK: mark}) as process:
        if can_brand():
            assert end_incarnation(mark)
            assert process.poll() is None
        monkeypatch.setattr(containment, "can_brand", lambda: False)
        assert ends(mark)
        assert process.wait() == -signal.SIGKILL


def test_a_cell_ends_with_all_that_is_in_it_and_in_cells_within() -> None:
    mark = f"{uuid4().hex}/0/0"
    with enclosed(mark) as process:
        cell = cell_of(mark)
        if cell is None or not cell.exists():
            process.kill()
            pytest.skip("there is no control group to be had")
        (cell / "inner").mkdir()
        (cell / "inner" / "cgroup.procs").write_text(str(process.pid))
        while not clear_cell(cell):
            pass
        assert process.wait() == -signal.SIGKILL
    assert not cell.exists()
