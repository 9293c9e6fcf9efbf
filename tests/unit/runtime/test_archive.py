import subprocess
import sys
from pathlib import Path

from muster.contracts.job.status import JobUid
from muster.contracts.settings.paths import JobFiles
from muster.runtime.archive import archive_files, claim_directory

OURS, THEIRS = JobUid("1" * 32), JobUid("2" * 32)


def test_claiming_archives_another_jobs_files(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "job")
    claim_directory(files, THEIRS)
    files.agent_socket(2).parent.mkdir()
    files.agent_socket(2).touch()
    claim_directory(files, OURS)
    assert not files.run.exists()
    assert JobFiles(tmp_path / f"job.{THEIRS}").agent_socket(2).exists()


def test_claiming_keeps_the_jobs_own_files(tmp_path: Path) -> None:
    files = JobFiles(tmp_path / "job")
    claim_directory(files, OURS)
    files.agent_socket(1).parent.mkdir()
    claim_directory(files, OURS)
    assert files.run.is_dir()


def test_an_interrupted_claim_can_be_repeated(tmp_path: Path) -> None:
    """A coordinator may be killed between any two calls."""
    killed = (
        "import os, sys; from pathlib import Path\n"
        "from muster.runtime.archive import claim_directory\n"
        "from muster.contracts.settings.paths import JobFiles\n"
        "os.rename = lambda *_: os._exit(9)\n"
        "claim_directory(JobFiles(Path(sys.argv[1])), sys.argv[2])"
    )
    files = JobFiles(tmp_path / "job")
    words = [sys.executable, "-c", killed, str(files.root), OURS]
    assert subprocess.run(words, check=False).returncode == 9
    assert not files.owner.exists()
    claim_directory(files, OURS)
    assert files.owner.read_text() == OURS


def test_archiving_missing_files_does_nothing(tmp_path: Path) -> None:
    archive_files(JobFiles(tmp_path / "job"), OURS)
    assert not list(tmp_path.iterdir())
