"""A terminal in a temporary directory, for commands that need no services."""

import os
import subprocess
import sys
from pathlib import Path

from muster.checkpoints.comparison import identity_of
from muster.host.containment import tag_of, tagged_processes
from tests.support.installation import DEADLINE_SECONDS, newest_checkpoint, without_ours


class Terminal:
    """Runs commands in one directory, as a person would."""

    def __init__(self, directory: Path, dataset_dir: Path) -> None:
        self.directory = directory
        self.environment = {
            **without_ours(os.environ),
            "MUSTER_DATA_DIR": str(directory / "data"),
            "DATASET_DIR": str(dataset_dir),
        }
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.directory,
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Return exit code and output."""
        process = self.start(*arguments, **environment)
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, output

    def digest(self, job_id: str, rank: int, world_size: int) -> str:
        """Return the identity of a rank's last state."""
        directory = self.directory / "checkpoints" / job_id / f"worker_{rank}"
        return identity_of(newest_checkpoint(directory, rank, world_size))

    def left_running(self) -> list[int]:
        """Return the processes that work in this directory without having been started here."""
        pids = [record.pid for record in tagged_processes("")]
        return [pid for pid in pids if tag_of(pid) and works_in(pid, self.directory)]


def works_in(pid: int, directory: Path) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"MUSTER_DATA_DIR={directory}".encode() in environment
