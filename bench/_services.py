"""An installation for one benchmark: API and coordinator in a temporary directory."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Services:
    """Use as a context manager; all files are in a temporary directory."""

    def __init__(
        self,
        slots: int = 16,
        database_url: str | None = None,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="muster-bench-"))
        self.database_url = database_url or f"sqlite:///{self.root}/muster.db"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._environ = os.environ | {
            "MUSTER_DATA_DIR": str(self.root),
            "MUSTER_DATABASE_URL": self.database_url,
            "MUSTER_PORT": str(self.port),
            "MUSTER_SLOTS": str(slots),
            "CHECKPOINT_DIR": str(self.root / "checkpoints"),
            "DATASET_DIR": str(self.root / "data"),
            **(environ or {}),
        }

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the services as well
        self._log = (self.root / "services.log").open("wb")
        self.api = self._start("api")
        self.coordinator = self._start("coordinator")
        while not self._is_healthy():
            if self.api.poll() is not None or self.coordinator.poll() is not None:
                self.api.kill()
                self.coordinator.kill()
                log = (self.root / "services.log").read_text()
                raise RuntimeError(f"the services did not start:\n{log[-2000:]}")
            time.sleep(0.05)
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.coordinator.send_signal(signal.SIGINT)
        self.coordinator.wait()
        self.api.terminate()
        self.api.wait()
        self._log.close()
        shutil.rmtree(self.root, ignore_errors=True)

    def stop_coordinator(self) -> None:
        """Stop the coordinator without a successor; its jobs continue."""
        self.coordinator.terminate()
        self.coordinator.wait()
        (self.root / "coordinator.json").unlink(missing_ok=True)

    def supervisors(self) -> list[int]:
        """Return the coordinator and its fork server."""
        pid = self.coordinator.pid
        return [pid, *filter(_is_fork_server, _children(pid))]

    def pids(self) -> list[int]:
        """Return the processes of the services."""
        return [self.api.pid, *self.supervisors()]

    def agents(self) -> list[int]:
        """Return the agents that run, or whose processor time no parent has counted yet."""
        supervisors = self.supervisors()
        found = [child for pid in supervisors for child in _children(pid)]
        return [pid for pid in found if pid not in supervisors]

    def wait_for_agents(self) -> None:
        while self.agents():
            time.sleep(0.01)

    def start_coordinator(self) -> None:
        self.coordinator = self._start("coordinator")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, json.dumps(body).encode())

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("PATCH", path, json.dumps(body).encode())

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None)

    def wait_for(self, job_id: str, *statuses: str) -> Any:
        """Return the job's summary once its status is one of these."""
        while (summary := self.get(f"/jobs/{job_id}/summary"))["status"] not in statuses:
            if summary["status"] == "FAILED":
                raise RuntimeError(f"{job_id} failed: {summary}")
            time.sleep(0.05)
        return summary

    def log(self, job_id: str, rank: int, attempt: int) -> Path:
        return self.root / "jobs" / job_id / "logs" / f"rank_{rank:05d}.{attempt:03d}.log"

    def _start(self, module: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            env=self._environ,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def _is_healthy(self) -> bool:
        try:
            return bool(self.get("/health")["status"] == "ok")
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=body,
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:  # noqa: S310  see above
            return json.load(answer)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_fork_server(pid: int) -> bool:
    try:
        return b"worker.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False


def memory_megabytes(pids: Iterable[int], field: str) -> float:
    """Return the memory of processes by fields of smaps_rollup that begin so, such as ``Pss:``."""
    lines: list[str] = []
    for pid in pids:
        with suppress(FileNotFoundError):  # it has ended
            lines += Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def cpu_seconds(pid: int, *, with_children: bool) -> float:
    """Return the CPU time of a process, optionally with that of its reaped children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = [int(field) for field in fields[11:15]]
    return sum(ticks if with_children else ticks[:2]) / TICKS_PER_SECOND
