"""Where every file of an installation lies. Nobody else joins a path to the data directory.

<data_dir>/
  muster.db                       the database, unless MUSTER_DATABASE_URL names another; its locks
  coordinator.json                where the coordinator listens for agents, replaced atomically
  up.lock, up.json                held by `muster up`; who that is and where, replaced atomically
  up.log                          what a detached `muster up` and its services have to say
  datasets/synthetic/             made for a job that named no data set
  secrets/                        what jobs refer to as file:NAME, see `muster.safe`
  jobs/<job_id>/
    uid                           whose files these are: an id may be used again, a uid never
    logs/rank_00000.000.log       stdout and stderr of rank 0, incarnation 0
    logs/rank_00000.000.times     when which byte of it had been written
    run/agent.log                 what the agent itself has to say
    run/agent.0003.sock           where ranks find the third agent, should it take over
    run/exits/rank_00000.000.exit how that process ended, durable before anyone is told
    run/exits/rank_00000.000.own  how it was about to end, by its own account
    run/rank_00000.000.error.json its error, as torch's `@record` writes it down
"""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

TIME_MARK: Final = struct.Struct("<QQ")
"""One entry of a ``.times`` file: the log's size in bytes, and when it had that size in
microseconds since 1970 (UTC). Every byte below the size was written by then."""

_LOG_NAME: Final = re.compile(r"rank_(\d{5})\.(\d{3,})\.log")


@dataclass(frozen=True, slots=True, order=True)
class LogName:
    """Which process wrote a log file; sorts by rank, then by incarnation."""

    rank: int
    incarnation: int

    @property
    def stem(self) -> str:
        return f"rank_{self.rank:05d}.{self.incarnation:03d}"

    @classmethod
    def parse(cls, file_name: str) -> "LogName | None":
        """Return whose log `file_name` is, or None if it is no log's name."""
        found = _LOG_NAME.fullmatch(file_name)
        return cls(int(found[1]), int(found[2])) if found else None


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The files of one job."""

    root: Path

    @classmethod
    def of_agent_socket(cls, agent_socket: Path) -> Self:
        """Return the files of the job whose agent listens there."""
        return cls(agent_socket.parent.parent)

    @property
    def owner(self) -> Path:
        return self.root / "uid"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def agent_log(self) -> Path:
        return self.run / "agent.log"

    def agent_socket(self, generation: int) -> Path:
        return self.run / f"agent.{generation:04d}.sock"

    @property
    def exits(self) -> Path:
        return self.run / "exits"

    def log(self, rank: int, incarnation: int) -> Path:
        return self.logs / f"{LogName(rank, incarnation).stem}.log"

    def times(self, rank: int, incarnation: int) -> Path:
        return self.logs / f"{LogName(rank, incarnation).stem}.times"

    def exit_record(self, rank: int, incarnation: int) -> Path:
        return self.exits / f"{LogName(rank, incarnation).stem}.exit"

    def error_file(self, rank: int, incarnation: int) -> Path:
        return self.run / f"{LogName(rank, incarnation).stem}.error.json"

    def own_account(self, rank: int, incarnation: int) -> Path:
        return self.exits / f"{LogName(rank, incarnation).stem}.own"


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """The files of one installation. `job_id` must have been checked before it comes here."""

    root: Path

    @property
    def coordinator_address(self) -> Path:
        return self.root / "coordinator.json"

    @property
    def keeper_lock(self) -> Path:
        return self.root / "up.lock"

    @property
    def keeper(self) -> Path:
        return self.root / "up.json"

    @property
    def keeper_log(self) -> Path:
        return self.root / "up.log"

    @property
    def synthetic_dataset(self) -> Path:
        return self.root / "datasets" / "synthetic"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    def job(self, job_id: str) -> JobFiles:
        return JobFiles(self.root / "jobs" / job_id)


def checkpoints_of_job(checkpoint_dir: Path, job_id: str) -> Path:
    """Return the directory of all checkpoints of a job."""
    return checkpoint_dir / job_id


def checkpoints_of_rank(checkpoint_dir: Path, job_id: str, rank: int) -> Path:
    """Return the directory of one rank's own checkpoints (independent mode)."""
    return checkpoints_of_job(checkpoint_dir, job_id) / f"worker_{rank}"


def rank_of_checkpoints(name: str) -> int | None:
    """Return whose a directory in that of a job's checkpoints is, or None if no rank's."""
    found = re.fullmatch(r"worker_(\d+)", name)
    return int(found[1]) if found else None
