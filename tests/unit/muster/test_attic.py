import subprocess
import sys
from pathlib import Path

from muster.attic import claim, set_aside
from muster.contracts.job import JobUid
from muster.contracts.layout import JobFiles

OURS, THEIRS = JobUid("1" * 32), JobUid("2" * 32)


def test_what_a_job_of_another_database_has_left_is_set_aside(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "job")
    claim(files, THEIRS)
    files.agent_socket(2).parent.mkdir()
    files.agent_socket(2).touch()
    claim(files, OURS)
    assert not files.run.exists()
    assert JobFiles(tmp_path / f"job.{THEIRS}").agent_socket(2).exists()


def test_what_is_a_jobs_own_stays(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "job")
    claim(files, OURS)
    files.agent_socket(1).parent.mkdir()
    claim(files, OURS)
    assert files.run.is_dir()


def test_a_claim_that_was_cut_short_is_made_by_the_next(tmp_path: Path) -> None:
    """A coordinator may be killed between any two of its calls."""
    killed = (
        "import os, sys; from pathlib import Path\n"
        "from muster.attic import claim; from muster.contracts.layout import JobFiles\n"
        "os.rename = lambda *_: os._exit(9)\n"
        "claim(JobFiles(Path(sys.argv[1])), sys.argv[2])"
    )
    files = JobFiles(tmp_path / "job")
    words = [sys.executable, "-c", killed, str(files.root), OURS]
    assert subprocess.run(words, check=False).returncode == 9
    assert not files.owner.exists()
    claim(files, OURS)
    assert files.owner.read_text() == OURS


def test_what_is_not_there_is_not_set_aside(tmp_path: Path) -> None:
    set_aside(JobFiles(tmp_path / "job"), OURS)
    assert not list(tmp_path.iterdir())
