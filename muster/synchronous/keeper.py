"""Coordinated checkpoints: one directory for the job, written by one member for all.

The state of a synchronous job is the same on every rank, so one copy is enough. It is written
between two steps, when every member has finished its sum: request and readiness are the step's own.
The layout's generation fences: whoever wrote for an older one is refused, from the moment the
member that saves has taken up a newer one.
"""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from muster.checkpoints.errors import CheckpointMismatch
from muster.checkpoints.filesystem import LocalFileSystem
from muster.checkpoints.owner import Owner
from muster.checkpoints.reader import Checkpoint, Reader
from muster.checkpoints.vault import Vault
from muster.contracts.environ import RankSettings
from muster.contracts.layout import checkpoints_of_job
from muster.synchronous.course import Course
from muster.synchronous.ledger import epochs_of, rows_of
from muster.synchronous.replica import Arrays, Committed, Replica

EPOCHS: Final = "muster.epochs"
"""The name of what every whole pass has consumed, beside the program's own arrays."""

COURSE: Final = "muster.course"
"""The name of what decides which sample is read when: a position means nothing on another one."""


class Keeper:
    """Saves and restores a job's one state."""

    def __init__(self, settings: RankSettings, warn: Callable[[str], None]) -> None:
        self._settings: Final = settings
        self._warn: Final = warn
        self._vault: Vault | None = None
        self._generation = -1

    def save(self, generation: int, world_size: int, replica: Replica, course: Course) -> None:
        """Make the replica durable. Raises a `CheckpointError`; every older one is as it was."""
        vault = self._vault_of(generation, world_size)
        position, epochs = replica.committed.position, rows_of(replica.committed.epochs)
        vault.save(
            position.step, position, {**replica.state, EPOCHS: epochs, COURSE: _facts(course)}
        )

    def claim(self, generation: int, world_size: int) -> None:
        """Fence older layouts: none of their members saves any more. Raises a `CheckpointError`."""
        self._vault_of(generation, world_size).claim()

    def restore(self, initial: Arrays, replica: Replica, course: Course) -> bool:
        """Fill the replica from the newest intact checkpoint; return whether there is one.

        Raises a `CheckpointError`: `CheckpointMismatch` for a state of another shape or on
        another course.
        """
        checkpoint = self._newest()
        if checkpoint is None:
            return False
        state = dict(checkpoint.state)
        _refuse_other_course(checkpoint.step, state.pop(COURSE, None), course)
        epochs = epochs_of(state.pop(EPOCHS))
        if _shapes(state) != _shapes(initial):
            raise CheckpointMismatch(
                f"the checkpoint of step {checkpoint.step} holds a state of another shape than the "
                "program begins with. Bring the program back to what it was, or begin a job that "
                "does not resume"
            )
        replica.flip(state, Committed(position=checkpoint.position, epochs=epochs))
        return True

    def close(self) -> None:
        if self._vault is not None:
            self._vault.close()

    def _newest(self) -> Checkpoint | None:
        owner = self._owner(generation=None, world_size=self._settings.world_size)
        own = self._reader(self._settings.job_id).newest(owner.owns)
        if own is None and self._settings.resume_from is not None:
            return self._reader(self._settings.resume_from).newest_of_last_job()
        return own

    def _vault_of(self, generation: int, world_size: int) -> Vault:
        if self._vault is None or generation != self._generation:
            self.close()
            self._generation = generation
            self._vault = Vault(
                files=LocalFileSystem(),
                directory=checkpoints_of_job(self._settings.checkpoint_dir, self._settings.job_id),
                owner=self._owner(generation, world_size),
                keep_last=self._settings.keep_last,
                clock=lambda: datetime.now(UTC),
                warn=self._warn,
            )
        return self._vault

    def _owner(self, generation: int | None, world_size: int) -> Owner:
        return Owner(
            job_id=self._settings.job_id,
            job_uid=self._settings.job_uid,
            rank=0,
            world_size=world_size,
            generation=generation,
        )

    def _reader(self, job_id: str) -> Reader:
        return Reader(
            files=LocalFileSystem(),
            directory=checkpoints_of_job(self._settings.checkpoint_dir, job_id),
            rank=0,
            world_size=None,
            warn=self._warn,
        )


def _facts(course: Course) -> dict[str, int]:
    return {
        "batch_size": course.batch_size,
        "seed": course.seed,
        "lines": course.totals.lines,
        "hash_sum": course.totals.hash_sum,
    }


def _refuse_other_course(step: int, before: object, course: Course) -> None:
    if before == _facts(course):
        return
    raise CheckpointMismatch(
        f"the checkpoint of step {step} was made with another batch size, seed or data set, so "
        "some samples would be read twice and others never. Take those it was made with, or begin "
        "a job that does not resume"
    )


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (array.shape, array.dtype) for name, array in state.items()}
