"""State that only a stale process would change; it is compared before and after."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from database.engine import Database
from database.leases import COORDINATOR_LEASE, Leases
from stress.stale.jobs import Training, older_names
from tests.support.frozen_hosts import Host, shared_memory
from tests.support.installation import Installation, is_over

LOCK_SECONDS = 2.0
"""Far longer than any running process locks the database."""


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
            process = f"{training.job_id}, worker {worker['worker_id']}"
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


def writable_memory(host: Host) -> set[int]:
    """Return the shared memory that ranks of a machine can write to, by its inodes."""
    return {inode for pid in host.ranks() for mode, inode in shared_memory(pid) if "w" in mode}


def mapped_memory(host: Host) -> set[int]:
    """Return all the shared memory that ranks of a machine have mapped."""
    return {inode for pid in host.ranks() for _, inode in shared_memory(pid)}


def _lease(installation: Installation) -> tuple[int, str] | None:
    database = Database.open(f"sqlite:///{installation.files.root / 'muster.db'}")
    try:
        lease = Leases(database).current(COORDINATOR_LEASE)
    finally:
        database.close()
    return (lease.epoch, lease.owner) if lease else None
