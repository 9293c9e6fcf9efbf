"""The handle a training script holds: ``run = muster.join()``.

    run = muster.join()
    state = run.restore() or {"weights": initial()}
    for batch in run.batches():
        loss = train(state, batch)
        run.step(loss=loss)
        if run.should_checkpoint or run.should_stop:
            run.checkpoint(state)
        if run.should_stop:
            break

The same script runs with nothing of ours around it: as rank 0 of 1, with its checkpoints below
``./checkpoints``. Under supervision its place comes from the environment, it beats from a thread,
and SIGTERM only raises `should_stop`.
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
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from muster.checkpoints.filesystem import LocalFileSystem
from muster.checkpoints.owner import Owner
from muster.checkpoints.reader import Checkpoint, Reader
from muster.checkpoints.vault import Vault
from muster.contracts.environ import RankSettings
from muster.contracts.layout import checkpoints_of_rank
from muster.contracts.messages import COUNT_MAX, METRIC_NAME_LIMIT, METRICS_LIMIT, Beat
from muster.contracts.shards import shards_of_rank
from muster.contracts.spec import JOB_ID_PATTERN
from muster.datasets.index import ShardIndex
from muster.datasets.listing import find_shards
from muster.line import Line
from muster.presence import Presence
from muster.program import refuse_while_loaded
from muster.reading import SampleReader
from muster.voice import Voice

STOP_LOOK_SECONDS: Final = 0.1
"""A sleep is not cut short by a signal, so long ones are taken in pieces."""


def join() -> "Run":
    """Return this process's place in its job, and start beating if somebody listens.

    Installs a handler for SIGTERM that raises `Run.should_stop`, and a last word for errors of
    ours, which end the process with a sentence and exit code 1. Raises `InvalidEnvironment`, and
    `InvalidProgram` in what is being loaded as the program of a job.
    """
    refuse_while_loaded()
    settings = RankSettings.read(os.environ, world_size=1, job_id=_own_job_id())
    run = Run(settings, Voice(Line.of(settings)))
    run.start()
    return run


class Run:
    """One rank's training run. For the main thread of a process."""

    def __init__(self, settings: RankSettings, voice: Voice) -> None:
        self.settings = settings
        self._total_steps: int | None = None
        self._reader = SampleReader(lambda: self.shards, settings.epochs)
        self._presence = Presence(voice, settings, self._beat)
        self._loss: float | None = None
        self._metrics: dict[str, float] = {}
        self._checkpoints_saved = 0
        self._last_checkpoint_step: int | None = None
        self._vault: Final = Vault(
            files=LocalFileSystem(),
            directory=self._checkpoints_of(settings.job_id),
            owner=Owner(
                job_id=settings.job_id,
                job_uid=settings.job_uid,
                rank=settings.rank,
                world_size=settings.world_size,
                generation=settings.generation,
            ),
            keep_last=settings.keep_last,
            clock=lambda: datetime.now(UTC),
            warn=self._presence.warn,
        )

    @property
    def rank(self) -> int:
        return self.settings.rank

    @property
    def world_size(self) -> int:
        return self.settings.world_size

    @property
    def restart_count(self) -> int:
        """How many processes have filled this rank before this one."""
        return self.settings.restart_count

    @property
    def total_steps(self) -> int | None:
        """How many steps this rank will take in all; shown to people.

        Known from the first call of `batches` or `samples` on, one step a batch; a program that
        counts otherwise may set it, to a whole number from 0 on.
        """
        return self._total_steps

    @total_steps.setter
    def total_steps(self, steps: int) -> None:
        steps = operator.index(steps)  # numpy's integers are no numbers to the wire
        if not 0 <= steps <= COUNT_MAX:
            raise ValueError(f"total_steps is {steps}: use a number from 0 to {COUNT_MAX}")
        self._total_steps = steps

    @property
    def steps_done(self) -> int:
        return self._reader.committed.step

    @property
    def epoch(self) -> int:
        """The pass over the data that the last step belonged to, from 0."""
        return self._reader.committed.epoch

    @property
    def should_stop(self) -> bool:
        """Whether somebody asked for an end: save, leave the loop, and exit with code 0."""
        return self._presence.is_stopping

    @property
    def should_checkpoint(self) -> bool:
        """Whether the job's `checkpoint_every` asks for a checkpoint after this step."""
        return self.steps_done % self.settings.checkpoint_every == 0

    def start(self) -> None:
        """Say hello and take over SIGTERM and errors of ours; `join` does this."""
        self._presence.start()
        atexit.register(self._vault.close)

    def restore(self) -> dict[str, Any] | None:
        """Return the state of the newest intact checkpoint, and go to its position.

        None if there is none: begin afresh. From here on no process that filled this rank before
        can save. Raises a `CheckpointError` that says what to do.
        """
        self._vault.claim()
        checkpoint = self._vault.restore() or self._inherited()
        if checkpoint is None:
            return None
        self._reader.go_to(checkpoint.position)
        self._last_checkpoint_step = checkpoint.step
        return checkpoint.state

    def samples(self) -> Iterator[Any]:
        """Yield the samples of this rank, parsed from JSON, from the exact resume position on.

        All remaining passes over the data, one sample at a time. What was yielded counts as
        consumed with the next `step`. Raises a `DatasetError` that names file and line.
        """
        for (sample,) in self.batches(1):
            yield sample

    def batches(
        self, size: int | None = None, decoder: msgspec.json.Decoder[Any] | None = None
    ) -> Iterator[list[Any]]:
        """Yield lists of `size` samples (default: the job's `batch_size`).

        A batch never spans two passes, so the last one of a pass may be shorter. `decoder` gives
        the samples a shape: ``msgspec.json.Decoder(MySample)``.
        """
        size = self.settings.batch_size if size is None else size
        if self.total_steps is None:
            batches = math.ceil(self.samples_per_epoch / size) if size > 0 else 0
            self.total_steps = self.settings.epochs * batches
        return self._reader.batches(size, decoder or msgspec.json.Decoder())

    def step(self, *, loss: float | None = None, **metrics: float) -> None:
        """Say that a step is done: everything handed out since the last one is consumed.

        Of the metrics 64 are shown, by up to 128 characters of their names.
        """
        self._reader.commit()
        if loss is not None:
            self._loss = float(loss)
        if metrics:
            # float(): numpy's numbers are no numbers to the wire.
            named = list(metrics.items())[:METRICS_LIMIT]
            self._metrics = {name[:METRIC_NAME_LIMIT]: float(value) for name, value in named}
        self._presence.news()

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Make `state` and the present position durable; no crash after this loses them.

        `state` maps names to numpy arrays and to what JSON can say. Raises a `CheckpointError`;
        every older checkpoint is then as it was.
        """
        position = self._reader.committed
        self._vault.save(position.step, position, state)
        self._checkpoints_saved += 1
        self._last_checkpoint_step = position.step

    @cached_property
    def samples_per_epoch(self) -> int:
        """The number of samples that this rank reads in one pass over the data."""
        return sum(ShardIndex.open(shard).lines for shard in self.shards)

    def rest(self, seconds: float) -> None:
        """Sleep, but no longer than until somebody asks for an end."""
        until = time.monotonic() + seconds
        while not self.should_stop and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, STOP_LOOK_SECONDS))

    @cached_property
    def shards(self) -> list[Path]:
        """The shard files of this rank, in the order they are read; raises a `DatasetError`."""
        shards = find_shards(self.settings.dataset_dir)
        return shards_of_rank(shards, self.rank, self.world_size)

    def _checkpoints_of(self, job_id: str) -> Path:
        return checkpoints_of_rank(self.settings.checkpoint_dir, job_id, self.rank)

    def _inherited(self) -> Checkpoint | None:
        """Return the checkpoint of the job that this one was asked to start from, if any."""
        source = self.settings.resume_from
        if source is None:
            return None
        return Reader(
            files=LocalFileSystem(),
            directory=self._checkpoints_of(source),
            rank=self.rank,
            world_size=self.world_size,
            warn=self._presence.warn,
        ).newest_of_last_job()

    def _beat(self, stopping: bool) -> Beat:  # noqa: FBT001  what a beat says of itself
        position = self._reader.committed
        return Beat(
            step=position.step,
            total_steps=self.total_steps,
            epoch=position.epoch,
            shard_idx=position.shard_idx,
            line_idx=position.line_idx,
            loss=_finite(self._loss),
            metrics={name: value for name, value in self._metrics.items() if math.isfinite(value)},
            checkpoints_saved=self._checkpoints_saved,
            last_checkpoint_step=self._last_checkpoint_step,
            stopping=stopping,
            waiting=False,
        )


def _own_job_id() -> str:
    """Return the job id of a script that runs by itself: its own name.

    Two scripts in one directory then do not take each other's checkpoints for theirs.
    """
    name = re.sub(r"[^A-Za-z0-9_-]", "-", Path(sys.argv[0]).stem)[:63]
    return name if re.fullmatch(JOB_ID_PATTERN, name) else "local"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
