"""A whole installation for tests: real services in a temporary directory, no process left behind.

Tests submit jobs, wait for conditions and kill processes. A wait that times out fails with the job,
its events and the ends of all logs.
"""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from muster.checkpoints.comparison import identity_of
from muster.checkpoints.reader import Checkpoint, CheckpointReader
from muster.checkpoints.store import open_store
from muster.contracts.job.status import TERMINAL
from muster.contracts.location import Location
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.paths import DataDir, checkpoints_of_rank
from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.host import processes
from muster.host.containment import tag_of, tagged_processes
from muster.host.processes import identify, send_signal

DEADLINE_SECONDS = 120.0
"""Far beyond what anything here takes on a busy machine; only a failure waits so long."""

FIRST_POLL_SECONDS, POLL_SECONDS = 0.02, 0.1
"""Between two looks: a long wait looks less often, as it costs the services processor time."""

SLOTS = 4
"""Of a narrow installation."""

TOGETHER = {"mode": "synchronous", "epochs": 100_000, "sleep_sec": 0.02, "max_workers": 4}
"""A job that trains until it is stopped."""

SHOWN_LINES = 30

Value = TypeVar("Value")

Undisturbed = Callable[..., list[str]]
"""Fields of a job → the digests of its ranks when nothing goes wrong."""

Seen = Mapping[str, Any]
"""The summary of a job, as the API gave it."""

OURS = ("JOB_ID", "RANK", "WORLD_SIZE", "CHECKPOINT_DIR", "DATASET_DIR", "MAX_RESTARTS")


@dataclass(slots=True)
class Service:
    """One process of the product that a test may end and start again."""

    module: str
    directory: Path
    environment: dict[str, str]
    words: tuple[str, ...] = ()
    name: str = ""
    """Of its log; the module's, if there is no other of it."""
    process: subprocess.Popen[bytes] | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.directory / f"{self.name or self.module}.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, *self.words],
                cwd=self.directory,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.module} was not started"
        return self.process.pid

    def end(self, number: signal.Signals) -> int:
        """Signal it and return its exit code."""
        assert self.process is not None, f"{self.module} was not started"
        self.process.send_signal(number)
        try:
            return self.process.wait(DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"{self.module} does not end after {number.name}:\n{end_of(self.log)}"
            ) from None
        finally:
            self.process = None


class Installation:
    """API and coordinator over one data directory below `root`."""

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        self.files = DataDir(root / "data")
        self.checkpoint_dir: Location = root / "checkpoints"
        self.environment = {
            **without_ours(os.environ),
            "MUSTER_DATA_DIR": str(self.files.root),
            "MUSTER_PORT": "0",
            "MUSTER_SLOTS": "64",
            "CHECKPOINT_DIR": str(self.checkpoint_dir),
            "DATASET_DIR": str(root / "shards"),
            **environment,
        }
        self.api = Service("api", root, self.environment)
        self.coordinator = Service("coordinator", root, self.environment)
        self.standby = Service("coordinator", root, self.environment, name="standby")
        """A second coordinator, for tests that start it."""
        self.deadline_seconds = DEADLINE_SECONDS
        self.uids: dict[str, str] = {}
        self._unfinished: set[str] = set()
        self._client = httpx.Client(timeout=DEADLINE_SECONDS)

    # Its processes

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the services that do not run, and wait until there is a coordinator."""
        if self.api.process is None:
            self.start_api()
        if self.coordinator.process is None:
            self.coordinator.start()
        await_value(self._is_coordinated, lambda: end_of(self.coordinator.log))

    def start_api(self) -> None:
        """Start the API, at the port it had before, and wait until it listens."""
        already = len(self.api.log.read_bytes()) if self.api.log.exists() else 0
        self.api.start()
        announced = await_value(
            lambda: re.search(r"http://127\.0\.0\.1:(\d+)", self.api.log.read_text()[already:]),
            lambda: f"the API does not start:\n{end_of(self.api.log)}",
        )
        self.environment["MUSTER_PORT"] = announced[1]
        self._client.base_url = announced[0]

    def restart_coordinator(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.coordinator.end(number)
        self.coordinator.start()

    def close(self) -> None:
        """End everything; fail if a process of a job is left once its services say it is over."""
        try:
            self.end_jobs()
        finally:
            for service in (self.standby, self.coordinator, self.api):
                if service.process is not None:
                    service.end(signal.SIGTERM)
            self._client.close()
            left = self.running_processes()
            for record in left:
                send_signal(record, signal.SIGKILL)
        assert not left, f"left behind: {left}"

    def end_jobs(self) -> None:
        """End every job that still goes on; then nothing of any job may run."""
        for job_id in self._unfinished:
            if not is_over(self.see(job_id)):
                self._client.delete(f"/jobs/{job_id}", params={"force": True})
        self._unfinished.clear()
        await_value(lambda: not self.running_processes(), lambda: f"{self.running_processes()}")

    def running_processes(self) -> list[ProcessRecord]:
        """Return every process of every job ever submitted here: agents, ranks, their children."""
        return [record for record, _ in self.tagged()]

    def running_ranks(self) -> list[ProcessRecord]:
        """Return the same without the agents, which leave a moment after their job is over."""
        return [record for record, tag in self.tagged() if tag.split("/")[1].isdigit()]

    def tagged(self) -> list[tuple[ProcessRecord, str]]:
        """Return every process of every job, each with its tag: the job's uid, what it is."""
        uids = set(self.uids.values())
        tagged = [(record, tag_of(record.pid) or "") for record in tagged_processes("")]
        return [(record, tag) for record, tag in tagged if tag.partition("/")[0] in uids]

    # Its jobs

    @property
    def url(self) -> str:
        """Where the API listens, or did."""
        return str(self._client.base_url).rstrip("/")

    def request(self, method: str, path: str, **arguments: object) -> httpx.Response:
        return self._client.request(method, path, **arguments)

    def submit(self, **fields: object) -> str:
        """Submit a job, of independent ranks unless `fields` say else; return its id."""
        answer = self._client.post("/jobs", json={"mode": "independent", **fields})
        assert answer.status_code == httpx.codes.CREATED, answer.text
        return self.note(answer.json())

    def note(self, job: Seen) -> str:
        """Note a job that was accepted, so that its end is waited for; return its id."""
        self.uids[job["job_id"]] = job["job_uid"]
        self._unfinished.add(job["job_id"])
        return str(job["job_id"])

    def stop(self, job_id: str, grace_seconds: float | None = None) -> None:
        body = {} if grace_seconds is None else {"grace_seconds": grace_seconds}
        answer = self._client.post(f"/jobs/{job_id}/stop", json=body)
        assert answer.is_success, answer.text

    def forget(self, job_id: str) -> None:
        """Do not wait for a deleted job; its processes must still be gone."""
        self._unfinished.discard(job_id)

    def forget_jobs(self) -> None:
        """Do not end the jobs at the end; their processes must still be gone."""
        self._unfinished.clear()

    def see(self, job_id: str) -> Seen:
        """Return the job's summary."""
        return self._get(f"/jobs/{job_id}/summary")

    def see_all(self) -> Sequence[Seen]:
        """Return the summaries of the newest jobs, all of one moment."""
        summaries: Sequence[Seen] = self._get("/jobs/summaries?limit=100")["jobs"]
        return summaries

    def job(self, job_id: str) -> Seen:
        return self._get(f"/jobs/{job_id}")

    def events(self, job_id: str) -> Sequence[Seen]:
        events: Sequence[Seen] = self._get(f"/jobs/{job_id}/events")["events"]
        return events

    def kinds(self, job_id: str) -> list[str]:
        """Return the kinds of the job's events, oldest first."""
        return [event["kind"] for event in self.events(job_id)]

    def wait_until(self, job_id: str, predicate: Callable[[Seen], object]) -> Seen:
        """Return the first summary for which `predicate` is true."""

        def read() -> Seen | None:
            seen = self.see(job_id)
            return seen if predicate(seen) else None

        return await_value(read, lambda: self.describe(job_id), self.deadline_seconds)

    def complete(self, job_id: str) -> Seen:
        """Wait for the end of a job, which has to be a good one."""
        seen = self.wait_until(job_id, is_over)
        assert seen["status"] == "COMPLETED", self.describe(job_id)
        return seen

    def fail(self, job_id: str) -> Seen:
        """Wait for the end of a job, which has to be FAILED; return the job."""
        seen = self.wait_until(job_id, is_over)
        assert seen["status"] == "FAILED", self.describe(job_id)
        return self.job(job_id)

    def kill(self, job_id: str, rank: int, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal a rank's process; return the pid it has or had."""
        seen = self.wait_until(job_id, lambda seen: pids(seen)[rank])
        pid: int = pids(seen)[rank]
        os.kill(pid, number)
        return pid

    # What its jobs leave

    def checkpoints(self, job_id: str, world_size: int) -> list[Checkpoint]:
        """Return the newest checkpoint of every rank; each must be the very newest there is."""
        places = (checkpoints_of_rank(self.checkpoint_dir, job_id, it) for it in range(world_size))
        return [newest_checkpoint(it, rank, world_size) for rank, it in enumerate(places)]

    def digests(self, job_id: str, world_size: int) -> list[str]:
        """Return the identity of every rank's last state, its position in the data included."""
        return [identity_of(checkpoint) for checkpoint in self.checkpoints(job_id, world_size)]

    def last_digest(self, job_id: str) -> str:
        """Return the digest of the last state; every sample has to be counted once."""
        audit = self._get(f"/jobs/{job_id}/audit")
        assert audit["exactly_once"], audit
        return str(audit["checkpoints"][-1]["digest"])

    def log(self, job_id: str, rank: int = 0) -> str:
        """Return the complete output of a rank."""
        logs = self.files.job(job_id).logs
        return "".join(path.read_text() for path in sorted(logs.glob(f"rank_{rank:05d}.*.log")))

    # What a person would look at

    def describe(self, job_id: str) -> str:
        parts = [f"{event['at']} {event['message']}" for event in self.events(job_id)]
        parts += [json.dumps(self.see(job_id), indent=1), json.dumps(self.job(job_id), indent=1)]
        files = self.files.job(job_id)
        logs = [*sorted(files.logs.glob("*.log")), files.agent_log]
        parts += [end_of(log) for log in [*logs, self.coordinator.log, self.api.log]]
        return "\n".join(parts)

    def _is_coordinated(self) -> bool:
        checks = self._client.get("/health").json()["checks"]
        return bool(checks["coordinator"]["status"] == "ok")

    def _get(self, path: str) -> Seen:
        answer = self._client.get(path)
        assert answer.is_success, answer.text
        return answer.json()


# What to wait for


Lent = TypeVar("Lent", bound=Installation)


def lent(installation: Lent) -> Iterator[Lent]:
    """Lend an installation to one test; what that has ended is started, and its jobs are ended."""
    installation.start()
    yield installation
    installation.start()
    installation.end_jobs()


def is_over(seen: Seen) -> bool:
    return seen["status"] in TERMINAL


def is_running(seen: Seen) -> bool:
    return bool(seen["status"] == "RUNNING")


def pids(seen: Seen) -> list[Any]:
    """Return the pid of every rank, None for those without a process."""
    return [worker["pid"] for worker in seen["workers"]]


def has_saved(seen: Seen) -> bool:
    """Whether every rank is alive and has something to go on from."""
    return all(
        worker["process"] == "live" and worker["last_checkpoint_step"] for worker in seen["workers"]
    )


def restarts(count: int, rank: int = 0) -> Callable[[Seen], bool]:
    """Whether a rank was restarted so often and is alive again, or has finished since."""

    def predicate(seen: Seen) -> bool:
        worker = seen["workers"][rank]
        return worker["restarts"] >= count and worker["process"] in {"live", "finished"}

    return predicate


@contextmanager
def locked(installation: Installation, begin: str = "BEGIN EXCLUSIVE") -> Iterator[None]:
    """Lock the SQLite file as a backup or another program would; IMMEDIATE lets others read."""
    path = installation.files.root / "muster.db"
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as database:
        database.execute(begin)
        yield
        database.execute("ROLLBACK")


# Helpers of tests about processes


def records(seen: Seen) -> list[ProcessRecord]:
    """Return the true names of a job's living ranks."""
    found = [identify(pid) for pid in pids(seen) if pid]
    return [record for record in found if record is not None]


def await_end(ended: Sequence[ProcessRecord]) -> None:
    """Wait until none of them runs."""
    await_value(
        lambda: not any(map(processes.is_running, ended)), lambda: f"one of {ended} still runs"
    )


def await_value(
    read: Callable[[], Value],
    explain: Callable[[], str],
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Value:
    """Return the first true value of `read`; fail with `explain` after a generous deadline."""
    deadline, pause = time.monotonic() + deadline_seconds, FIRST_POLL_SECONDS
    while not (value := read()):
        assert time.monotonic() < deadline, f"timed out\n{explain()}"
        time.sleep(pause)
        pause = min(POLL_SECONDS, 1.2 * pause)
    return value


def end_of(log: Path) -> str:
    if not log.exists():
        return f"--- {log.name} is not there"
    lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return "\n".join([f"--- {log.name}", *lines])


def newest_checkpoint(directory: Location, rank: int, world_size: int | None) -> Checkpoint:
    """Return what a successor would go on from; it must be the very newest there is."""
    warnings: list[str] = []
    reader = CheckpointReader(
        store=open_store(directory), rank=rank, world_size=world_size, warn=warnings.append
    )
    found = reader.newest()
    assert found is not None, f"{directory} holds no checkpoint"
    assert not warnings, warnings
    return found


def write_small_dataset(directory: Path) -> Path:
    """Write 8 shards of 64 lines: each of two ranks takes 16 steps per epoch."""
    write_dataset(directory, synthetic(samples=512, shards=8, features=8, classes=3))
    return directory


def without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which nothing configures the product yet; `python` is this one."""
    own = {
        name: value
        for name, value in environ.items()
        if name not in OURS and not name.startswith(("MUSTER_", "TORCHELASTIC_"))
    }
    return {**own, "PATH": f"{Path(sys.executable).parent}:{environ.get('PATH', os.defpath)}"}
