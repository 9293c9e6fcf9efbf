"""The path of every file of an installation. No other module joins a path to the data directory.

<data_dir>/
  muster.db                       the database, unless MUSTER_DATABASE_URL names another; its locks
  node.key                        the key pair of this node, whose id is derived from it
  cluster.key                     the secret that the machines of a household share
  election.json                   session and epoch of this node, durable before they are sent
  cluster.json, cluster.founder   the cluster of this node; that its secret was made here
  nodes.json                      the members of the cluster, on the node that leads
  replication.sock                where services wait for the copies of the database
  muster.db.rows-…                what a copy of it has not executed yet
  coordinator.json                where processes of this host reach the coordinator
  disk.reserve                    room that is given up so that a full disk can be cleared
  up.lock, up.json                held by `muster up`; its process and address
  up.log, up.log.1                output of a detached `muster up` and its services
  checkpoints/<job_id>/           of jobs that name no directory, unless CHECKPOINT_DIR is set
  datasets/synthetic/             generated for a job that names no data set
  secrets/                        what jobs refer to as file:NAME
  snapshots/<job uid>/            the code of a job with `code: snapshot`
  foreground/<job_id>/            a directory like this one, of the services of a `muster run`
    ended                         made when its job has completed or failed: no command resumes it
  foreground/peers.<group>/       the same of a `muster run --peers`
  jobs/<job_id>/
    uid                           the job that owns this directory: an id may be reused, a uid not
    code.json                     the digests of the files that its ranks run
    logs/rank_00000.000.log       stdout and stderr of rank 0, attempt 0
    logs/rank_00000.000.times     when each byte of it was written
    logs/rank_00000.000.host      a link that names the host that has sent both, if another has
    run/agent.log, agent.log.1    output of the agent itself
    run/agent.0003.sock           where ranks reconnect to the third agent after a takeover
    run/storage.log, storage.sock output of the storage process, and where it listens; its lock
    run/exits/rank_00000.000.exit how that process ended, durable before it is reported
    run/exits/rank_00000.000.own  the exit report that the rank wrote itself
    run/rank_00000.000.error.json its error, as torch's `@record` writes it
"""

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from muster.contracts.location import Location

TIME_MARK: Final = struct.Struct("<QQ")
"""One entry of a ``.times`` file: a size of the log in bytes, and when it had that size in
microseconds since 1970 (UTC). Every byte below the size was written by then."""

LOG_EPOCH_BYTES: Final = 1 << 42
"""After each truncation by its program, a log goes on at the next multiple of this: the size in an
entry, like every other offset, then counts from there. So no offset ever means two bytes."""

_LOG_NAME: Final = re.compile(r"rank_(\d{5})\.(\d{3,})\.log")

LOW_BYTES: Final = 1 << 30
LOW_SHARE: Final = 0.05
"""A disk below both is nearly full: a gigabyte is much on a small disk, little on a large one."""

LOW_FILES: Final = 10_000  # the same for inodes: a job of few ranks makes some dozens of files


def size_text(size_bytes: int) -> str:
    """Return a size for people, such as ``512 MiB`` or ``1.5 GiB``."""
    power = max(0, min(size_bytes.bit_length() - 1, 40) // 10)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size_bytes / 1024**power:.1f}".removesuffix(".0") + f" {unit}"


def is_nearly_full(free_bytes: int, total_bytes: int) -> bool:
    """Return whether a disk has too few free bytes to continue for long."""
    return free_bytes < min(LOW_BYTES, LOW_SHARE * total_bytes)


def has_few_files_left(free_files: int, total_files: int) -> bool:
    """Return whether a disk has too few free inodes; False for a file system without a limit."""
    return free_files < min(LOW_FILES, LOW_SHARE * total_files)


@dataclass(frozen=True, slots=True, order=True)
class LogName:
    """The process that wrote a log file; sorts by rank, then by attempt."""

    rank: int
    attempt: int

    @property
    def key(self) -> tuple[int, int]:
        return self.rank, self.attempt

    @property
    def stem(self) -> str:
        return f"rank_{self.rank:05d}.{self.attempt:03d}"

    @classmethod
    def parse(cls, file_name: str) -> "LogName | None":
        """Return the rank and attempt in `file_name`, or None if it is not a log's name."""
        found = _LOG_NAME.fullmatch(file_name)
        return cls(int(found[1]), int(found[2])) if found else None


class _Below:
    """A path below the root of `JobFiles` or `DataDir`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, files: "JobFiles | DataDir", _: type) -> Path:
        return files.root / self._name


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The files of one job."""

    root: Path

    owner = _Below("uid")
    code = _Below("code.json")
    logs = _Below("logs")
    run = _Below("run")
    agent_log = _Below("run/agent.log")
    storage_log = _Below("run/storage.log")
    storage_socket = _Below("run/storage.sock")
    exits = _Below("run/exits")

    @classmethod
    def of_agent_socket(cls, agent_socket: Path) -> Self:
        """Return the files of the job whose agent listens on this socket."""
        return cls(agent_socket.parent.parent)

    def agent_socket(self, agent_number: int) -> Path:
        return self.run / f"agent.{agent_number:04d}.sock"

    def log(self, rank: int, attempt: int) -> Path:
        return self.logs / f"{LogName(rank, attempt).stem}.log"

    def times(self, rank: int, attempt: int) -> Path:
        return self.logs / f"{LogName(rank, attempt).stem}.times"

    def log_host(self, rank: int, attempt: int) -> Path:
        return self.logs / f"{LogName(rank, attempt).stem}.host"

    def exit_record(self, rank: int, attempt: int) -> Path:
        return self.exits / f"{LogName(rank, attempt).stem}.exit"

    def exit_report(self, rank: int, attempt: int) -> Path:
        return self.exits / f"{LogName(rank, attempt).stem}.own"

    def error_file(self, rank: int, attempt: int) -> Path:
        return self.run / f"{LogName(rank, attempt).stem}.error.json"


@dataclass(frozen=True, slots=True)
class DataDir:
    """The files of one installation. Callers must have validated every `job_id`."""

    root: Path

    database = _Below("muster.db")
    cluster_record = _Below("cluster.json")
    founder_mark = _Below("cluster.founder")
    election = _Below("election.json")
    nodes = _Below("nodes.json")
    replication_socket = _Below("replication.sock")
    coordinator_address = _Below("coordinator.json")
    ssh_sockets = _Below("ssh")
    disk_reserve = _Below("disk.reserve")
    services_lock = _Below("up.lock")
    services_record = _Below("up.json")
    services_log = _Below("up.log")
    runs = _Below("foreground")
    ended = _Below("ended")
    checkpoints = _Below("checkpoints")
    synthetic_dataset = _Below("datasets/synthetic")
    secrets = _Below("secrets")
    jobs = _Below("jobs")

    def foreground(self, job_id: str) -> Self:
        return type(self)(self.runs / job_id)

    @property
    def is_foreground(self) -> bool:
        return self.root.parent.name == "foreground"

    @property
    def node_key(self) -> Path:
        """The key of this node, which a `muster run` has in common with the other services."""
        return self._shared / "node.key"

    @property
    def cluster_key(self) -> Path:
        """The secret of the household, likewise."""
        return self._shared / "cluster.key"

    @property
    def _shared(self) -> Path:
        return self.root.parent.parent if self.is_foreground else self.root

    def job(self, job_id: str) -> JobFiles:
        return JobFiles(self.jobs / job_id)

    def snapshot(self, job_uid: str) -> Path:
        return self.root / "snapshots" / job_uid


def checkpoints_of_job(checkpoint_dir: Location, job_id: str) -> Location:
    """Return the place of all checkpoints of a job."""
    return checkpoint_dir / job_id


def checkpoints_of_rank(checkpoint_dir: Location, job_id: str, rank: int) -> Location:
    """Return the place of one rank's own checkpoints (independent mode)."""
    return rank_place(checkpoints_of_job(checkpoint_dir, job_id), rank)


def rank_place(checkpoints: Location, rank: int) -> Location:
    """Return the place of one rank's own checkpoints below those of its job."""
    return checkpoints / f"worker_{rank}"


def rank_of_checkpoints(name: str) -> int | None:
    """Return the rank whose checkpoint directory is called `name`, or None."""
    found = re.fullmatch(r"worker_(\d+)", name, re.ASCII)
    return int(found[1]) if found else None
