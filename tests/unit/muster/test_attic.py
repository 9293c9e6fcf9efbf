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


def test_what_is_not_there_is_not_set_aside(tmp_path: Path) -> None:
    set_aside(JobFiles(tmp_path / "job"), OURS)
    assert not list(tmp_path.iterdir())
