"""A synchronous job in an installation, with methods to watch, change and disturb it."""

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from muster.checkpoints.comparison import digests
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.settings.paths import checkpoints_of_job
from tests.support.installation import Installation, Seen, Value, await_value, is_over
from tests.support.paced import PACE_FILE, request_to_hang

PACE_SECONDS = 0.05
"""Of one virtual shard, while a job is slowed down."""

PROGRAM: Mapping[str, Any] = {
    "mode": "synchronous",
    "program": "paced.py:Paced",
    "working_dir": str(Path(__file__).parent),
    "batch_size": 64,
    "virtual_shards": 16,
    "epochs": 12,
}
"""On 512 samples: 96 steps."""


class PooledJob:
    """One job. It trains slowly until `hurries` is called."""

    def __init__(
        self,
        installation: Installation,
        *,
        pace_seconds: float = PACE_SECONDS,
        env: Mapping[str, str] | None = None,
        **fields: object,
    ) -> None:
        self.installation = installation
        self._pace = installation.root / f"pace-{uuid4().hex}"
        self._pace.write_text(str(pace_seconds))
        described = {**PROGRAM, **fields, "env": {PACE_FILE: str(self._pace), **(env or {})}}
        self.job_id = installation.submit(**described)

    def see(self) -> Seen:
        return self.installation.see(self.job_id)

    def workers(self) -> list[Seen]:
        """Return the past and present workers of the pool."""
        answer = self.installation.request("GET", f"/jobs/{self.job_id}/workers")
        assert answer.is_success, answer.text
        return list(answer.json()["workers"])

    def kinds(self) -> list[str]:
        """Return the kinds of its events, oldest first."""
        return self.installation.kinds(self.job_id)

    def states(self) -> dict[int, str]:
        return {int(worker["worker_id"]): worker["state"] for worker in self.workers()}

    def active(self) -> dict[int, int]:
        """Return the pid of each active worker."""
        return {
            int(worker["worker_id"]): worker["pid"]
            for worker in self.workers()
            if worker["state"] == "active" and worker["pid"]
        }

    def audit(self) -> Seen:
        answer = self.installation.request("GET", f"/jobs/{self.job_id}/audit")
        assert answer.is_success, answer.text
        return dict(answer.json())

    def digest(self) -> str:
        """Return the digest of its last checkpoint, data position included."""
        directory = checkpoints_of_job(self.installation.checkpoint_dir, self.job_id)
        ((_, _, digest),) = digests(checkpoint_dirs(directory))
        return digest

    def wait_until(self, read: Callable[[], Value]) -> Value:
        """Return the first true value of `read`."""
        return await_value(
            read,
            lambda: f"{self.workers()}\n{self._describe()}",
            self.installation.deadline_seconds,
        )

    def trains_with(self, *workers: int) -> dict[int, int]:
        """Wait until exactly these workers train together; return their pids."""

        def read() -> dict[int, int]:
            active = self.active()
            is_running = self.see()["status"] == "RUNNING"
            return active if is_running and set(active) == set(workers) else {}

        return await_value(read, self._describe)

    def wait_for_steps(self, count: int = 2) -> int:
        """Wait for so many further steps; return the step."""
        target = self.see()["step"] + count
        self.wait_until(lambda: self.see()["step"] >= target)
        return int(self.see()["step"])

    def wait_for_status(self, status: str) -> Seen:
        return self.installation.wait_until(self.job_id, lambda seen: seen["status"] == status)

    def hurries(self) -> None:
        self._pace.unlink(missing_ok=True)

    def completes(self) -> str:
        """Wait until it completes; return its digest."""
        self.hurries()
        self.installation.complete(self.job_id)
        audit = self.audit()
        assert audit["complete"], audit
        assert audit["exactly_once"] is True, audit
        return self.digest()

    def scales(self, world_size: int) -> None:
        self._asks("PATCH", "", json={"world_size": world_size})

    def pauses(self) -> None:
        self._asks("POST", "/pause")

    def resumes(self) -> None:
        self._asks("POST", "/resume")

    def lets_go(self, worker_id: int) -> None:
        self._asks("POST", f"/workers/{worker_id}/leave")

    def signals(self, worker_id: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal a worker's process; return its pid."""
        pid = self.active()[worker_id]
        os.kill(pid, number)
        return pid

    def lets_one_hang(self) -> None:
        """Make the first rank that asks hang in the program."""
        request_to_hang(self._pace).touch()

    def is_over(self) -> bool:
        return is_over(self.see())

    def _asks(self, method: str, path: str, **body: object) -> None:
        answer = self.installation.request(method, f"/jobs/{self.job_id}{path}", **body)
        assert answer.is_success, answer.text

    def _describe(self) -> str:
        return self.installation.describe(self.job_id)
