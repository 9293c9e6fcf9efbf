"""The jobs of stale hosts, and their state that only a stale process would change."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from database.engine import Database
from database.leases import Leases
from muster.checkpoints.manifest import LATEST, CheckpointName, parse_latest
from muster.contracts.settings.paths import checkpoints_of_job, checkpoints_of_rank
from stress.frozen_hosts import CoordinatorHost, shared_memory
from tests.support.installation import Installation, Seen, is_over

LOCK_SECONDS = 2.0
"""Far longer than any running process locks the database."""

KINDS: Mapping[str, Mapping[str, Any]] = {
    "independent": {"mode": "independent", "world_size": 3},
    "shared memory": {"mode": "synchronous", "backend": "shared_memory", "world_size": 3},
    "tcp": {"mode": "synchronous", "backend": "tcp", "world_size": 2},
}
COMMON = {"checkpoint_every": 5, "max_restarts": 100_000, "max_kills": 100_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A job of one kind."""

    kind: str
    job_id: str

    def directories(self, root: Path) -> list[Path]:
        """Return where its checkpoints are, of each rank or of all."""
        if self.kind != "independent":
            return [checkpoints_of_job(root, self.job_id)]
        ranks = range(KINDS[self.kind]["world_size"])
        return [checkpoints_of_rank(root, self.job_id, rank) for rank in ranks]


def latest_of(directory: Path) -> CheckpointName | None:
    try:
        return parse_latest((directory / LATEST).read_bytes())
    except OSError:
        return None


def generation_in(directory: Path) -> int:
    """Return whose checkpoint `LATEST` names; -1 if there is none."""
    latest = latest_of(directory)
    return -1 if latest is None else latest.generation


def is_finished(seen: Seen, rank: int) -> bool:
    return bool(seen["workers"][rank]["process"] == "finished")


def older_names(directory: Path) -> set[CheckpointName]:
    """Return the checkpoints of all generations but the one of `LATEST`."""
    latest = latest_of(directory)
    names = filter(None, map(CheckpointName.parse, (path.name for path in directory.iterdir())))
    return {name for name in names if latest is None or name.generation < latest.generation}


def is_locked(installation: Installation) -> bool:
    """True if a frozen process holds a SQLite transaction, so that writes fail."""
    path = installation.files.root / "muster.db"
    with closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
    return False


def standing(installation: Installation, trainings: Sequence[Training]) -> dict[str, Any]:
    """Return the lease, who is which rank, and the names of older generations."""
    found: dict[str, Any] = {"lease": _lease(installation)}
    for training in trainings:
        seen = installation.see(training.job_id)
        for worker in seen["workers"]:
            ended = {**worker["endings"]}
            # To finish is no harm; whatever else ends a process is.
            pid = None if ended.pop("finished", 0) or is_over(seen) else worker["pid"]
            process = f"{training.job_id}, rank {worker['rank']}, attempt {worker['attempt']}"
            gone = (None, worker["restarts"], str(ended))
            found[process] = {(pid, worker["restarts"], str(ended)), gone}
        for directory in training.directories(installation.checkpoint_dir):
            found[str(directory)] = older_names(directory)
    return found


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is not as it was; of several values it may become fewer."""
    for what, value in before.items():
        is_same = after[what] <= value if isinstance(value, set) else after[what] == value
        if not is_same:
            yield f"{what}: {value} became {after[what]}"


def writable_memory(host: CoordinatorHost) -> set[int]:
    """Return the shared memory that ranks of a machine can write to, by its inodes."""
    return {inode for pid in host.ranks() for mode, inode in shared_memory(pid) if "w" in mode}


def mapped_memory(host: CoordinatorHost) -> set[int]:
    """Return all the shared memory that ranks of a machine have mapped."""
    return {inode for pid in host.ranks() for _, inode in shared_memory(pid)}


def _lease(installation: Installation) -> tuple[int, str] | None:
    database = Database.open(f"sqlite:///{installation.files.root / 'muster.db'}")
    try:
        lease = Leases(database).current()
    finally:
        database.close()
    return (lease.epoch, lease.owner) if lease else None
