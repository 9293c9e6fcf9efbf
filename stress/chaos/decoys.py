"""Innocent processes that look like ours: whatever is killed, they must live."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from muster.contracts.environ import PROCESS_TAG, PROCESS_TAG_WIDTH
from tests.support.installation import without_ours

SLEEP = "import time; time.sleep(7775)"


class Decoys:
    """Some at the start, and one beside each job that is named."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = (directory / "decoys.log").open("ab")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._start("with an agent's words", {}, "-P", "-m", "worker.agent")
        self._start("with a template's words", {}, "-P", "-m", "muster.training.prefork")
        self._start("with another installation's mark", {PROCESS_TAG: f"{'0' * 32}/0/0"})
        self._start("with an empty mark", {PROCESS_TAG: ""})

    def stand_beside(self, job_uid: str) -> None:
        """Start one whose mark is that of the job but for one letter."""
        nearly = job_uid[:-1] + ("0" if job_uid[-1] != "0" else "1")
        self._start(f"beside {job_uid}", {PROCESS_TAG: f"{nearly}/0/0".ljust(PROCESS_TAG_WIDTH)})

    def __len__(self) -> int:
        return len(self._processes)

    def killed(self) -> list[str]:
        """Return those that do not live any more."""
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
