"""Coordinated checkpoints: one directory for the job, written by one member for all.

The state of a synchronous job is the same on every rank, so one copy is enough. It is written
between two steps, when every member has finished its sum; no other agreement is needed. The round
of the group is the fencing token: once a member of a newer group has claimed the directory, a save
for an older group is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from muster.checkpoints.errors import CheckpointError, CheckpointMismatch, OtherArithmetic
from muster.checkpoints.listing import refuse_other_schedule
from muster.checkpoints.manifest import ARITHMETIC, BEST, SCHEDULE, VALUES, VIRTUAL_SHARDS, Manifest
from muster.contracts.job.field_types import compression_facts
from muster.contracts.messages.rank import EpochDone
from muster.contracts.settings.environ import RankSettings
from muster.contracts.settings.paths import checkpoints_of_job
from muster.runtime.fingerprint import Fingerprint
from muster.runtime.storage_client import Checkpoints, open_checkpoints, session_of
from muster.training.groups.state_sync import Arrays, Committed, Replica
from muster.training.schedule import Schedule

EPOCHS: Final = "muster.epochs"
"""The array, beside the program's own, of what every finished epoch consumed.

An array, because the JSON part of a checkpoint has a size limit."""


STOP: Final = "muster.stop"
"""`IS_STOPPED` after the last step of a program that stopped training, `STOP_REQUESTED` before."""

IS_STOPPED: Final = "stopped"
STOP_REQUESTED: Final = "requested"


class Witness(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a shard of the step after a checkpoint came out as, where the state was saved."""

    job_uid: str
    step: int
    state: str  # its digest
    code: Mapping[str, str]  # digests, by path, of what was loaded there
    shard: int = 0
    seen: Any = None


class Checkpointer:
    """Saves and restores the state of a synchronous job."""

    def __init__(self, settings: RankSettings, warn: Callable[[str], None]) -> None:
        self._settings: Final = settings
        self._warn: Final = warn
        self._checkpoints: Checkpoints | None = None
        self._generation: int | None = -1
        self.arithmetic: Fingerprint | None = None
        """Of this process, if a checkpoint may be continued by the same one only."""
        self.code: Mapping[str, str] = {}
        """Digests, by path, of the user's code that this process has loaded."""
        self._unwitnessed: Witness | None = None  # of the last save, until its next step is known
        self._restored: Witness | None = None

    def save(
        self,
        generation: int,
        world_size: int,
        replica: Replica,
        schedule: Schedule,
        on_saved: Callable[[int], None] = lambda _bytes: None,
        best: float | None = None,
    ) -> None:
        """Save the replica, and call `on_saved` once it is durable; see `RemoteCheckpoints`."""
        checkpoints = self._checkpoints_of(generation, world_size)
        position = replica.committed.position
        values = {
            EPOCHS: rows_of(replica.committed.epochs),
            SCHEDULE: _facts(schedule) | self._compression(),
        }
        values[VIRTUAL_SHARDS] = schedule.virtual_shards
        if (arithmetic := self.arithmetic) is not None:
            values[ARITHMETIC] = arithmetic.value
        if best is not None:
            values[BEST] = best
        if replica.committed.values:
            values[VALUES] = replica.committed.values.decode()
        if replica.committed.is_stopped or replica.committed.stop_requested:
            values[STOP] = IS_STOPPED if replica.committed.is_stopped else STOP_REQUESTED
        checkpoints.save(position.step, position, {**replica.state, **values}, on_saved)

    def expect_witness(self, step: int, digest: str) -> None:
        """Keep what the next step comes out as beside the checkpoint that was saved just now."""
        uid = self._settings.job_uid
        if uid is not None:  # else it was started by hand, and nothing tells what was changed
            self._unwitnessed = Witness(job_uid=uid, step=step, state=digest, code=self.code)
        if (known := self._restored) is not None and known.state == digest:
            self.put_witness(known.shard, known.seen)  # also if this process is a wrong one

    def is_witness_expected(self, step: int) -> bool:
        return self._unwitnessed is not None and self._unwitnessed.step == step

    def put_witness(self, shard: int, seen: Any) -> None:  # noqa: ANN401  any JSON value
        """Write what a shard of the step after the last save came out as."""
        known, self._unwitnessed = self._unwitnessed, None
        if known is not None and self._checkpoints is not None:
            known = msgspec.structs.replace(known, shard=shard, seen=seen)
            with suppress(CheckpointError):  # no state depends on it
                self._checkpoints.put_witness(msgspec.json.encode(known))

    def witness(self, replica: Replica) -> Witness | None:
        """Return the witness of the state from which this job starts again.

        None if it was started by hand, and None, with a warning, if there is none of the same job
        and code. (A checkpoint of the same job with other arithmetic is refused by `restore`.)
        """
        if self._settings.job_uid is None:
            return None
        found, state = None, replica.digest()
        checkpoints = self._checkpoints or self._checkpoints_of(None, self._settings.world_size)
        with suppress(CheckpointError, msgspec.MsgspecError):
            found = msgspec.json.decode(checkpoints.witness(), type=Witness)
        if found is None or (found.job_uid, found.state) != (self._settings.job_uid, state):
            why = "this job has left no witness.json of that state"
        elif edited := [key for key, own in self.code.items() if found.code.get(key, own) != own]:
            why = f"{edited[0]} has changed"
        else:
            self._restored = found
            return found
        step = replica.position.step
        self._warn(f"what the body computes in step {step} is not compared with before: {why}")
        return None

    def flush(self) -> None:
        """Wait until the last save is durable. Raises `CheckpointError` if it is not."""
        if self._checkpoints is not None:
            self._checkpoints.flush()

    def claim(self, generation: int, world_size: int) -> None:
        """Fence older groups: none of their members can save. Raises `CheckpointError`."""
        self._checkpoints_of(generation, world_size).claim()

    def best(self, generation: int, world_size: int) -> float | None:
        """Return the metric of the job's best checkpoint, None without one; raises as `claim`."""
        return self._checkpoints_of(generation, world_size).best()

    def restore(self, initial: Arrays, replica: Replica, schedule: Schedule) -> bool:
        """Fill the replica from the newest intact checkpoint; return False if there is none.

        Raises `CheckpointError`, `CheckpointMismatch` for a state of another shape or schedule,
        `OtherArithmetic` for one of this job that another kind of host has computed.
        """
        checkpoints = self._checkpoints or self._checkpoints_of(None, self._settings.world_size)
        checkpoint = checkpoints.restore()
        if checkpoint is None:
            return False
        state = dict(checkpoint.state)
        wanted = {"drop_last": 0, "compression": "none", **_facts(schedule), **self._compression()}
        wanted["virtual_shards"] = schedule.virtual_shards
        refuse_other_schedule(state, wanted, f"of step {checkpoint.step}")
        for name in (SCHEDULE, VIRTUAL_SHARDS):
            state.pop(name, None)
        epochs, text = epochs_of(state.pop(EPOCHS)), state.pop(VALUES, "")
        # A job that resumes from another one goes on where that one ended.
        is_own = checkpoint.manifest.job_uid == self._settings.job_uid
        stop = state.pop(STOP, None)
        stop = stop if is_own else None
        self._compare_arithmetic(checkpoint.manifest)
        there, here = _shapes(state), _shapes(initial)
        other = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
        if other:
            raise CheckpointMismatch(
                f"the checkpoint of step {checkpoint.step} holds a state of another shape than the "
                f"program begins with: {other[0]!r} is {there.get(other[0], 'missing')} there and "
                f"{here.get(other[0], 'missing')} here. Bring the program back to what it was, or "
                "begin a job that does not resume"
            )
        values = text.encode()
        committed = Committed(
            position=checkpoint.position,
            epochs=epochs,
            values=values,
            is_stopped=stop == IS_STOPPED,
            stop_requested=stop == STOP_REQUESTED,
        )
        replica.commit(state, committed)
        return True

    def _compare_arithmetic(self, manifest: Manifest) -> None:
        why = "" if self.arithmetic is None else self.arithmetic.difference(manifest)
        if not why:
            return
        # A start by hand, or of another job, has chosen to go on from it.
        if manifest.job_uid is None or manifest.job_uid != self._settings.job_uid:
            self._warn(f"{why}. Training goes on, from that step on with the bits of this host")
            return
        again = f"or go on with other bits in a new job (resume_from: {manifest.job_id})"
        raise OtherArithmetic(f"{why}; {again}")

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()

    def _checkpoints_of(self, generation: int | None, world_size: int) -> Checkpoints:
        if self._checkpoints is None or generation != self._generation:
            self.close()
            self._generation = generation
            of_rank = session_of(self._settings, self._place_of)
            of_all = {"rank": 0, "world_size": world_size, "any_world_size": True}
            session = msgspec.structs.replace(
                of_rank, **of_all, generation=generation, restore_from=None
            )
            self._checkpoints = open_checkpoints(self._settings, session, self._warn)
        return self._checkpoints

    def _compression(self) -> dict[str, str | int]:
        return compression_facts(self._settings.compression, self._settings.compression_groups)

    def _place_of(self, job_id: str) -> str:
        return str(checkpoints_of_job(self._settings.checkpoint_dir, job_id))


def rows_of(epochs: Sequence[EpochDone]) -> NDArray[np.uint64]:
    """Return (epochs, fields of `EpochDone`) numbers, each below 2^64."""
    rows = [msgspec.structs.astuple(epoch) for epoch in epochs]
    return np.array(rows, np.uint64).reshape(-1, len(EpochDone.__struct_fields__))


def epochs_of(rows: NDArray[Any]) -> tuple[EpochDone, ...]:
    """Return the epochs from which `rows_of` made these rows."""
    names = EpochDone.__struct_fields__
    return tuple(EpochDone(**dict(zip(names, row, strict=True))) for row in rows.tolist())


def _facts(schedule: Schedule) -> dict[str, int | str]:
    return {
        "batch_size": schedule.batch_size,
        "seed": schedule.seed,
        "lines": schedule.totals.lines,
        "hash_sum": schedule.totals.hash_sum,
        **({"drop_last": 1} if schedule.drop_last else {}),
    }


def _shapes(state: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{array.dtype} {[*array.shape]}" for name, array in state.items()}
