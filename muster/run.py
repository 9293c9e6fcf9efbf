"""The handle a training script holds: ``run = muster.join()``.

    run = muster.join()
    run.restore(into={"model": model, "optimizer": optimizer})
    for batch in run.batches():
        loss = train(model, optimizer, batch)
        run.step(loss=loss)
        if run.should_checkpoint or run.should_stop:
            run.checkpoint(model=model, optimizer=optimizer)
        if run.should_stop:
            break

The same script runs without any service: as rank 0 of 1, with its checkpoints below
``./checkpoints``. Under supervision its rank comes from the environment, a thread sends heartbeats,
and SIGTERM only sets `should_stop`.
"""

import atexit
import math
import operator
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from muster.checkpoints.errors import CheckpointMissing, RestoreDamaged, UnsupportedState
from muster.checkpoints.manifest import ARITHMETIC
from muster.checkpoints.nested import flatten, load_into, unflatten
from muster.contracts.errors import MusterError
from muster.contracts.job.field_types import JOB_ID_PATTERN
from muster.contracts.location import S3Location
from muster.contracts.messages.rank import (
    METRIC_NAME_LIMIT,
    METRICS_LIMIT,
    Heartbeat,
    RestoreFailed,
)
from muster.contracts.messages.wire import encodable
from muster.contracts.rank import COUNT_MAX, RankProgress
from muster.contracts.series import LOSS
from muster.contracts.settings.environ import RankSettings
from muster.contracts.settings.paths import checkpoints_of_rank
from muster.contracts.settings.services import ServiceSettings
from muster.contracts.shards import Reading
from muster.datasets.reader import SampleReader
from muster.datasets.source import DataSource
from muster.program import InvalidProgram, refuse_while_loaded
from muster.runtime.agent_client import AgentClient, AgentSocket
from muster.runtime.exit_report import print_error
from muster.runtime.heartbeat import Supervision
from muster.runtime.save_timer import SaveTimer
from muster.runtime.stderr_messages import flush_streams
from muster.runtime.storage_client import Checkpoints, open_checkpoints, open_data, session_of

if TYPE_CHECKING:
    from muster.mesh.group import MeshBackend
    from muster.mesh.replicas import ReplicaCheckpoints
    from muster.runtime.fingerprint import Fingerprint

STOP_CHECK_SECONDS: Final = 0.1
"""time.sleep() resumes after a signal handler (PEP 475), so a long sleep is cut into pieces."""


def join(*, backend: "MeshBackend | None" = None) -> "Run":
    """Return this process's run, and start heartbeats if it has an agent.

    `backend` is that of `muster.mesh.discover`: its members have checkpoints together.

    Installs a SIGTERM handler that sets `Run.should_stop`, and an exception hook that prints an
    uncaught error of Muster as one sentence (exit code 1). Raises `InvalidEnvironment`, and
    `InvalidProgram` while a module is being loaded as the program of a managed job, and for a
    backend in one.
    """
    refuse_while_loaded()
    if backend is None:
        settings = RankSettings.read(os.environ, world_size=1, job_id=own_job_id())
    else:
        settings = _settings_of(backend)
    if backend is not None and settings.job_uid is not None:
        raise InvalidProgram("a rank of a job has its group from it: call join() without backend")
    run = Run(settings, AgentClient(AgentSocket.of(settings)), backend)
    atexit.register(run.exit_failed)  # called last
    run.start()
    return run


class Run:
    """One rank's training run. For the main thread of a process."""

    def __init__(
        self, settings: RankSettings, client: AgentClient, backend: "MeshBackend | None" = None
    ) -> None:
        """With a backend, whose members read and save the same, `settings` are of rank 0 of 1."""
        self.settings = settings
        self._total_steps: int | None = None
        self.reading: Final = Reading(rank=settings.rank, world_size=settings.world_size)
        self._reader = SampleReader(lambda: self.source, settings.epochs, self.reading)
        self._supervision = Supervision(client, settings, self._beat)
        self._loss: float | None = None
        self._metrics: dict[str, float] = {}
        self._checkpoints_saved = 0
        self._last_checkpoint: dict[str, Any] = {"last_checkpoint_step": None}
        self._save_timer: Final = SaveTimer()
        self._exit_code = 0
        self.is_complete = False
        """Whether the program's loop is over. Set at the end of `batches` and of the last step; a
        program with another loop may set it, so that a slow exit after it is no failure."""
        self._backend = backend
        self._session: Final = session_of(settings, self._checkpoints_of)
        self._checkpoints = self._open(backend)

    @property
    def rank(self) -> int:
        return (self._backend or self.settings).rank

    @property
    def world_size(self) -> int:
        return (self._backend or self.settings).world_size

    @property
    def restart_count(self) -> int:
        """How many earlier attempts this rank has had."""
        return self.settings.restart_count

    @property
    def total_steps(self) -> int | None:
        """How many steps this rank will take in all, for display.

        Set by the first call of `batches` or `samples`, one step per batch, unless the samples of a
        store are not counted. A program that counts differently may set it to an integer of at
        least 0.
        """
        return self._total_steps

    @total_steps.setter
    def total_steps(self, steps: int) -> None:
        steps = operator.index(steps)  # the encoder refuses numpy integers
        if not 0 <= steps <= COUNT_MAX:
            raise ValueError(f"total_steps is {steps}: use a number from 0 to {COUNT_MAX}")
        self._total_steps = steps

    @property
    def steps_done(self) -> int:
        """How many steps this run has taken, those of earlier attempts included.

        A program that counts its steps itself, such as a trainer of another library, may set it.
        """
        return self._reader.committed.step

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        self._reader.committed = replace(self._reader.committed, step=steps)

    @property
    def epoch(self) -> int:
        """The epoch of the present batch, counted from 0: after the loop, of the last step."""
        # The reader counts once more at the end.
        return min(self._reader.epoch, max(self.settings.epochs - 1, self._reader.committed.epoch))

    @property
    def should_stop(self) -> bool:
        """Whether the run should end: save, leave the loop, and exit with code 0."""
        return self._supervision.is_stopping

    @property
    def should_checkpoint(self) -> bool:
        """Whether the job's `checkpoint_every` asks for a checkpoint after this step."""
        every = self.settings.checkpoint_every
        return self._save_timer.is_due() if every == "auto" else self.steps_done % every == 0

    def start(self) -> None:
        """Connect to the agent, and handle SIGTERM and errors of Muster; `join` calls this."""
        self._supervision.start()
        atexit.register(self._close)

    def restore(
        self, into: Mapping[str, Any] | None = None, *, backend: "MeshBackend | None" = None
    ) -> dict[str, Any] | None:
        """Return the state of the newest intact checkpoint, and seek to its position.

        `into` names objects with `state_dict` and `load_state_dict`; each loads its part of the
        state, once all are known to fit. None if there is no checkpoint. All ranks of a gang get
        the newest that all of them have; if only some ranks save, the others get None. From now on
        no earlier attempt of this rank can save. Raises a `CheckpointError` that says what to do.

        A run with a backend restores together with all members, who call this, the newest that any
        of them has; with a new `backend` it goes on as a member of that group. If it has taken
        steps and no member has a checkpoint, it raises `CheckpointMissing`.
        """
        if backend is not None:
            if self._backend is None:
                raise ValueError("this run has no backend: call muster.join(backend=backend) first")
            self._checkpoints.close()
            # Opened anew: another process of this host may have saved in the group before.
            self._backend, self._checkpoints = backend, self._open(backend)
        try:
            self._checkpoints.claim()
            checkpoint = self._checkpoints.restore()
        except RestoreDamaged as damage:
            point = self.settings.restore_from or ""
            report = RestoreFailed(restore_from=point, message=encodable(str(damage)))
            self._supervision.send_waiting(report)
            raise
        if checkpoint is None:
            if self._backend is not None and self.steps_done:
                # Some may have taken a step that others have not.
                raise CheckpointMissing("no member has a checkpoint: start all scripts anew")
            return None
        ours = self._arithmetic()
        if ours is not None and (why := ours.difference(checkpoint.manifest)):
            self._supervision.warn(f"{why}. Training goes on")
        state = unflatten(checkpoint.state)
        load_into(into or {}, state, checkpoint.step)
        self._reader.go_to(checkpoint.position)
        self._supervision.recorder.go_to(checkpoint.step)
        self._last_checkpoint = {"last_checkpoint_step": checkpoint.step}
        return state

    def samples(self) -> Iterator[Any]:
        """Yield this rank's samples, parsed from JSON, of all remaining epochs.

        Starts at the exact resume position. Yielded samples count as consumed with the next `step`.
        Raises a `DatasetError` that names file and line.
        """
        for (sample,) in self.batches(1):
            yield sample

    def batches(
        self, size: int | None = None, decoder: msgspec.json.Decoder[Any] | None = None
    ) -> Iterator[list[Any]]:
        """Yield lists of `size` samples (default: the job's `batch_size`).

        A batch never spans two epochs, so the last one of an epoch may be shorter. `decoder` sets
        the type of the samples: ``msgspec.json.Decoder(MySample)``.

        Of a run with a backend all members call this. Raises `DatasetDiffers` if one of them has
        other samples.
        """
        if self._backend is not None:
            from muster.mesh.replicas import compare_samples  # noqa: PLC0415  imports numpy

            compare_samples(self._backend, self.source)
        size = self.settings.batch_size if size is None else size
        if self._total_steps is None and size > 0 and (samples := self.count_samples()) is not None:
            self.total_steps = self.settings.epochs * math.ceil(samples / size)
        return self._until_complete(self._reader.batches(size, decoder or msgspec.json.Decoder()))

    def _until_complete(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        self.is_complete = False
        yield from batches
        self.is_complete = True

    def step(self, *, loss: float | None = None, **metrics: float) -> None:
        """Report that a step is done: all samples since the previous step are consumed.

        At most 64 metrics are shown, with up to 128 characters of their names.
        """
        self._reader.commit()
        self.report(loss=loss, **metrics)

    def report(self, *, loss: float | None = None, **metrics: float) -> None:
        """Report loss and metrics without a step. Each keeps its value until it is reported again.

        A metric `val_loss` is the job's validation loss, by which `muster leaderboard` compares.
        """
        # float(): the encoder refuses numpy numbers.
        given = {name[:METRIC_NAME_LIMIT]: float(value) for name, value in metrics.items()}
        self._metrics = dict(islice((self._metrics | given).items(), METRICS_LIMIT))
        values = {name: value for name, value in given.items() if name in self._metrics}
        if loss is not None:
            values[LOSS] = self._loss = float(loss)
        self._supervision.recorder.take(self.steps_done, values)
        self._supervision.report()

    def checkpoint(self, state: Mapping[str, Any] | None = None, /, **objects: Any) -> None:  # noqa: ANN401
        """Make a state and the current position durable; no later crash loses them.

        The state is what is in `state`, and under their names the `state_dict()` of `objects`, or
        the objects themselves if they have none.

        In an object store it is durable a little later if the rank has an agent: the state is
        copied when this returns, another process saves it, and the next call waits for that.
        `flush` waits for it, and the end of the process does.

        Of a run with a backend only the lowest rank of each host saves; elsewhere this returns at
        once. The state has to be the same on all members.

        A state maps names to PyTorch tensors, numpy arrays, None, bools, ints, floats, strings, and
        lists, tuples and dicts of these. `restore` returns tensors on the CPU. Raises a
        `CheckpointError`; older checkpoints are then unchanged.
        """
        parts = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in objects.items()
        }
        if twice := sorted(parts.keys() & (state or {}).keys()):
            raise UnsupportedState(f"{twice[0]!r} is given twice: leave one of the two out")
        self._supervision.report_code()
        position = self._reader.committed
        noted = partial(self._note_saved, position.step)
        with self._save_timer.saving():
            flat = flatten({**(state or {}), **parts} if parts or state is None else state)
            if isinstance(flat, dict) and (ours := self._arithmetic()) is not None:
                flat[ARITHMETIC] = ours.value
            self._checkpoints.save(position.step, position, flat, noted)

    def flush(self) -> None:
        """Wait until the last checkpoint is durable; raises a `CheckpointError` if it is not."""
        self._checkpoints.flush()

    def count_samples(self) -> int | None:
        """Return how many samples this rank reads in one epoch; None if it takes a download."""
        own = self.reading.shard_idxs(len(self.source.shards))
        is_listed = all(self.source.shards[idx].lines is not None for idx in own)
        if not is_listed and isinstance(self.source.location, S3Location):
            return None
        return sum(shard.lines for shard in self.source.totals(own))

    def rest(self, seconds: float) -> None:
        """Sleep, but return early once `should_stop` is set."""
        until = time.monotonic() + seconds
        while not self.should_stop and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, STOP_CHECK_SECONDS))

    @cached_property
    def source(self) -> DataSource:
        """The data set; raises a `DatasetError`."""
        return open_data(self.settings, self._supervision.warn)

    def _arithmetic(self) -> "Fingerprint | None":
        """Return what decides the bits of this process; None if nothing is compared."""
        if self.settings.bits == "any" or "numpy" not in sys.modules:
            return None
        from muster.runtime.fingerprint import known_arithmetic  # noqa: PLC0415  imports numpy

        return known_arithmetic(str(getattr(sys.modules.get("torch"), "__version__", "")))

    def _open(self, backend: "MeshBackend | None") -> "Checkpoints | ReplicaCheckpoints":
        if backend is None:
            return open_checkpoints(self.settings, self._session, self._supervision.warn)
        from muster.mesh.replicas import ReplicaCheckpoints  # noqa: PLC0415  imports numpy

        return ReplicaCheckpoints(self._session, self._supervision.warn, backend)

    def _checkpoints_of(self, job_id: str) -> str:
        return str(checkpoints_of_rank(self.settings.checkpoint_dir, job_id, self.settings.rank))

    def _note_saved(self, step: int, size_bytes: int) -> None:
        self._checkpoints_saved += 1
        self._last_checkpoint = {
            "last_checkpoint_step": step,
            "last_checkpoint_bytes": size_bytes,
            "last_checkpoint_at": datetime.now(UTC),
        }

    def _close(self) -> None:
        try:
            self._checkpoints.flush()
        except MusterError as error:
            self._exit_code = print_error(error)
        self._checkpoints.close()
        is_last = self.total_steps is not None and self.steps_done >= self.total_steps
        self._supervision.is_complete = not self._exit_code and (self.is_complete or is_last)

    def exit_failed(self) -> None:
        """End the process with an error if its last checkpoint could not be made durable."""
        if self._exit_code:
            flush_streams()
            os._exit(self._exit_code)

    def _beat(self, stopping: bool) -> Heartbeat:  # noqa: FBT001  a field of Heartbeat
        position = self._reader.committed
        return Heartbeat(
            progress=RankProgress(
                step=position.step,
                total_steps=self.total_steps,
                epoch=position.epoch,
                shard_idx=position.shard_idx,
                line_idx=position.line_idx,
                loss=self._loss,
                metrics=self._metrics,
                **self._last_checkpoint,
            ),
            checkpoints_saved=self._checkpoints_saved,
            stopping=stopping,
            waiting=False,
        )


def own_job_id(suffix: str = "") -> str:
    """Return the job id of a script without services: its file name.

    So two scripts in one directory do not share checkpoints.
    """
    name = re.sub(r"[^A-Za-z0-9_-]", "-", Path(sys.argv[0]).stem + suffix)[:63]
    return name if re.fullmatch(JOB_ID_PATTERN, name) else "local"


def _settings_of(backend: "MeshBackend") -> RankSettings:
    """Return the settings of a script that runs alone, but that it saves in a place of its node."""
    # Where nothing is set, below the data directory; nodes may share what is set.
    place = ServiceSettings.read(os.environ, cores=1).checkpoint_dir
    place /= backend.members[backend.rank].node_id
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "CHECKPOINT_DIR": str(place)}
    # All scripts of this user save there: others of this name, or of one that is shortened alike.
    said = os.fsencode(Path(sys.argv[0]).resolve()) + b"\0" + backend.group.encode()
    job_id = f"{own_job_id(f'-{backend.group}')[:54]}-{sha256(said).hexdigest()[:8]}"
    return RankSettings.read(environ, world_size=1, job_id=job_id)
