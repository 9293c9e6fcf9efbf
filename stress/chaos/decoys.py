"""Unrelated processes that resemble those of Muster; they must survive all kills."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from muster.contracts.settings.names import PROCESS_TAG, PROCESS_TAG_WIDTH
from tests.support.installation import without_ours

SLEEP = "import time; time.sleep(7775)"


class Decoys:
    """Some from the start, and one more for each job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = (directory / "decoys.log").open("ab")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._start("with an agent's arguments", {}, "-P", "-m", "worker.agent")
        self._start("with a prefork server's arguments", {}, "-P", "-m", "muster.training.prefork")
        self._start("with another installation's tag", {PROCESS_TAG: f"{'0' * 32}/0/0"})
        self._start("with an empty tag", {PROCESS_TAG: ""})

    def stand_beside(self, job_uid: str) -> None:
        """Start one whose process tag differs from the job's in one letter."""
        nearly = job_uid[:-1] + ("0" if job_uid[-1] != "0" else "1")
        self._start(f"beside {job_uid}", {PROCESS_TAG: f"{nearly}/0/0".ljust(PROCESS_TAG_WIDTH)})

    def __len__(self) -> int:
        return len(self._processes)

    def killed(self) -> list[str]:
        """Return those that were killed."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._log.close()

    def _start(self, name: str, environment: Mapping[str, str], *words: str) -> None:
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-c", SLEEP, *words],
            cwd=self._directory,
            env={**without_ours(os.environ), **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
