"""Reports the progress of a rank to its agent and its log, and saves its checkpoints."""

import atexit
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from muster.checkpoints.errors import CheckpointFailed
from muster.collectives.errors import CollectiveError, PeerUnreachable
from muster.contracts.messages.rank import (
    METRIC_NAME_LIMIT,
    METRICS_LIMIT,
    Heartbeat,
    JoinedGroup,
    PeerLost,
    Saved,
    StateMismatch,
    WorkerGroup,
)
from muster.contracts.rank import RankProgress
from muster.contracts.series import LOSS
from muster.contracts.settings.environ import RankSettings
from muster.contracts.shards import Position
from muster.runtime.agent_client import AgentClient
from muster.runtime.heartbeat import Supervision
from muster.runtime.stderr_messages import LastMessage, print_stdout
from muster.training.blocks import BusyFlag
from muster.training.checkpointer import Checkpointer
from muster.training.groups.group import WorkersDiverged
from muster.training.groups.state_sync import Arrays, Committed, Replica
from muster.training.schedule import Schedule
from muster.training.schema import Means
from muster.training.trainer import Outcome

PROGRESS_SECONDS: Final = 1.0
"""At most one progress line per second."""

WAIT_PIECE_SECONDS: Final = 0.02
"""A wait is taken in pieces; between two the rank checks for a new group."""

RETRY_SECONDS: Final = 1.0
"""Between two attempts to save the last checkpoint, while the disk is full."""

EPOCHS_PER_MESSAGE: Final = 256
"""Keeps every message within the limit of the channel, however long the job."""

_LAST_LINES: Final = {
    Outcome.DONE: "is done",
    Outcome.STOPPED: "is asked to stop",
    Outcome.LEFT: "leaves; the others go on",
}


class Reporter:
    """The `TrainerCallbacks` of a rank."""

    def __init__(self, settings: RankSettings, agent: AgentClient, busy: BusyFlag) -> None:
        self.supervision: Final = Supervision(agent, settings, self._beat)
        self.busy: Final = busy
        self._settings = settings
        self._schedule: Schedule
        self._total_steps: int | None = None
        self._initial: Arrays = {}
        self._initial_values = b""
        self.checkpointer: Final = Checkpointer(settings, self.supervision.warn)
        self.checkpointer.code = agent.code
        self._position = Position()
        self._means: Means | None = None
        self._reported: dict[str, tuple[float, int]] = {}
        """What the program reported last, by name, and after which step."""
        kept = settings.keep_best
        self._metric: Final = None if kept is None else kept.metric
        self._sign: Final = -1 if kept is not None and kept.mode == "max" else 1
        self._best = -math.inf  # less is better; nothing is until the checkpoints are known
        self._measured = -1, math.nan  # the metric, and after which step
        self._gives_series = False  # all ranks have the same values: the first one reports them
        self._checkpoints_saved = 0
        self._last_checkpoint: dict[str, Any] = {"last_checkpoint_step": None}
        self._warned = LastMessage()
        """The last warning about failed saves; None once a save succeeded."""
        self.is_unchecked = False
        """Whether the program may give other bits each time; see `RankProgress`."""
        self._epochs_reported = 0
        self._has_unused_host = False
        self._next_line_at = 0.0
        atexit.register(self.checkpointer.close)

    @property
    def loss(self) -> float | None:
        """That of the last step; None before one."""
        return None if self._means is None else self._means.loss

    def set_schedule(self, initial: Arrays, schedule: Schedule, values: bytes = b"") -> None:
        """Set what a job without a checkpoint begins with: its arrays, and `Committed.values`."""
        self._initial, self._initial_values, self._schedule = initial, values, schedule
        self._total_steps = schedule.total_steps

    def load_state(self, worker_group: WorkerGroup, replica: Replica) -> None:
        with self.busy:
            self.checkpointer.claim(worker_group.round, len(worker_group.members))
            is_resumed = self.checkpointer.restore(self._initial, replica, self._schedule)
        if is_resumed:
            self._last_checkpoint = {"last_checkpoint_step": replica.position.step}
            # The rank that saved it may have died before it could report it.
            self._report_saved(worker_group.round, replica.committed, replica.digest())
            self._print(replica.position.step, "goes on from the checkpoint")
        else:
            initial = {name: array.copy() for name, array in self._initial.items()}
            begun = Committed(position=Position(), values=self._initial_values)
            replica.commit(initial, begun)

    def on_group_joined(self, worker_group: WorkerGroup, replica: Replica) -> None:
        self._gives_series = worker_group.members[0].rank == self._settings.rank
        if self._gives_series:
            # A full disk is reported by the first save, which fences as well.
            with self.busy, suppress(CheckpointFailed):
                self.checkpointer.claim(worker_group.round, len(worker_group.members))
                if self._metric is not None:
                    best = self.checkpointer.best(worker_group.round, len(worker_group.members))
                    self._best = math.inf if best is None else self._sign * best
            self._warn_of_unused(worker_group)
        # A rank with nothing left to do reports no other step than this one.
        self._take_position(replica)
        step = replica.position.step
        self.supervision.send(JoinedGroup(round=worker_group.round, step=step))
        self.supervision.report_next()  # the job's events tell when each group took its first step
        verb = "is paused" if worker_group.paused else "goes on"
        self._print(step, f"{verb} with {len(worker_group.members)} workers")

    def _warn_of_unused(self, worker_group: WorkerGroup) -> None:
        """Warn once of hosts that are more than the groups of compression."""
        hosts = [*dict.fromkeys(member.host for member in worker_group.members)]
        groups = self._settings.compression_groups or len(hosts)
        if (unused := ", ".join(hosts[groups:])) and not self._has_unused_host:
            self._has_unused_host = True
            self.supervision.warn(
                f"compression_groups is {groups}, and a group lies on one host: of {len(hosts)} "
                f"hosts {unused} computes nothing. Run the job on fewer hosts, or a new one with "
                "more groups"
            )

    def on_peer_lost(self, worker_group: WorkerGroup, error: CollectiveError) -> None:
        unreachable = error.rank if isinstance(error, PeerUnreachable) else None
        words = str(error)
        if unreachable is None:  # it numbers the members of the group, an event the job's ranks
            ranks = {
                f"rank {at}": f"rank {peer.rank}" for at, peer in enumerate(worker_group.members)
            }
            words = re.sub(r"\brank \d+", lambda match: ranks.get(match[0], match[0]), words)
        self.supervision.send(
            PeerLost(round=worker_group.round, message=words, unreachable=unreachable)
        )

    def on_state_mismatch(self, worker_group: WorkerGroup, error: WorkersDiverged) -> None:
        workers = tuple(worker_group.members[member].worker_id for member in error.members)
        said = StateMismatch(worker_group.round, workers, str(error), error.entries)
        self.supervision.send(said)

    def on_step(self, replica: Replica, means: Means) -> None:
        self._take_position(replica)
        self._means = means
        self.supervision.report_code()  # not only before a save: it takes no time
        if self._gives_series:
            values = {**means.metrics, LOSS: means.loss}
            self.supervision.recorder.take(replica.position.step, values)
        self.supervision.report()
        now = time.monotonic()
        if now >= self._next_line_at:
            self._next_line_at = now + PROGRESS_SECONDS
            self._print(replica.position.step, f"loss {means.loss:.4f}")

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report what the program has measured after a step, on this rank alone."""
        # float(): the encoder refuses numpy numbers.
        given = {name[:METRIC_NAME_LIMIT]: float(value) for name, value in metrics.items()}
        reported = self._reported | {name: (value, step) for name, value in given.items()}
        self._reported = dict(islice(reported.items(), METRICS_LIMIT))
        shown = {name: value for name, value in given.items() if name in self._reported}
        self.supervision.recorder.take(step, shown)
        value = given.get(self._metric or "", math.nan)
        if math.isfinite(value):
            self._measured = step, self._sign * value
        self.supervision.report()

    def is_best(self, replica: Replica) -> bool:
        step, value = self._measured
        return step == replica.position.step and value < self._best

    def save_checkpoint(self, worker_group: WorkerGroup, replica: Replica) -> None:
        generation, committed = worker_group.round, replica.committed
        digest = replica.digest()
        if self.is_best(replica):
            with self.busy:  # the checkpoint before may be a better one, and is not durable yet
                self.flush()
        best = self._measured[1] if self.is_best(replica) else None
        if self._metric is not None and self._measured[0] < 0 and committed.epochs:
            names = ", ".join(sorted(self._reported)) or "nothing"
            self.supervision.warn(
                f"keep_best keeps nothing yet: in an epoch, run.report() got {names} on this rank, "
                f"and no {self._metric!r}"
            )
            self._measured = 0, math.nan  # once is enough

        def report_saved(size_bytes: int) -> None:
            self._best = self._best if best is None else best
            self._checkpoints_saved += 1
            self._last_checkpoint = {
                "last_checkpoint_step": committed.position.step,
                "last_checkpoint_bytes": size_bytes,
                "last_checkpoint_at": datetime.now(UTC),
            }
            self._warned.text = None
            self._report_saved(generation, committed, digest)

        with self.busy:
            self.checkpointer.save(
                generation,
                len(worker_group.members),
                replica,
                self._schedule,
                report_saved,
                None if best is None else self._sign * best,
            )
            self.checkpointer.expect_witness(committed.position.step, digest)
        if self._schedule.is_over(replica.committed):
            self.flush()

    def flush(self) -> None:
        """Wait until the last checkpoint is durable; raises a `CheckpointError` if it is not."""
        self.checkpointer.flush()

    def on_checkpoint_failed(self, replica: Replica, error: CheckpointFailed) -> None:
        is_over = self._schedule.is_over(replica.committed)
        effect = "the job is done when it succeeds" if is_over else "training goes on meanwhile"
        # Only once: every attempt fails while the disk is full.
        if self._warned.is_new(effect):
            self.supervision.warn(
                f"could not save a checkpoint and will try again; {effect}: {error}"
            )

    def wait_before_retry(self, check: Callable[[], None]) -> None:
        _wait(RETRY_SECONDS, check)

    def wait_between_steps(self, check: Callable[[], None]) -> None:
        _wait(self._settings.sleep_sec, check)

    def end(self, outcome: Outcome, note: str = "") -> None:
        """Print why training is over, and a note; the exit of the process follows."""
        self.supervision.is_complete = outcome is Outcome.DONE
        self._print(self._position.step, _LAST_LINES[outcome] + note)

    def _take_position(self, replica: Replica) -> None:
        self._position = replica.position
        # A job is complete once all of its steps are taken.
        if self._schedule.is_over(replica.committed):
            self._total_steps = replica.position.step

    def _report_saved(self, generation: int, committed: Committed, digest: str) -> None:
        """Report the checkpoint and every finished epoch that this process has not reported.

        The last epochs are always included again, which makes up for a lost message.
        """
        position, epochs = committed.position, committed.epochs
        first = min(self._epochs_reported, max(0, len(epochs) - EPOCHS_PER_MESSAGE))
        self._epochs_reported = len(epochs)
        for start in range(first, max(len(epochs), first + 1), EPOCHS_PER_MESSAGE):
            self.supervision.send_waiting(
                Saved(
                    generation=generation,
                    step=position.step,
                    epoch=position.epoch,
                    digest=digest,
                    consumed=position.consumed,
                    consumed_hash=position.consumed_hash,
                    epochs=epochs[start : start + EPOCHS_PER_MESSAGE],
                )
            )

    def _beat(self, stopping: bool) -> Heartbeat:  # noqa: FBT001  a field of the heartbeat
        position, means = self._position, self._means
        taken = {} if means is None else means.metrics
        metrics = {name: (value, position.step) for name, value in taken.items()} | self._reported
        return Heartbeat(
            progress=RankProgress(
                step=position.step,
                total_steps=self._total_steps,
                epoch=position.epoch,
                shard_idx=0,
                line_idx=position.line_idx,
                loss=self.loss,
                is_unchecked=self.is_unchecked,
                metrics={name: value for name, (value, _) in metrics.items()},
                metric_steps={name: step for name, (_, step) in metrics.items()},
                **self._last_checkpoint,
            ),
            checkpoints_saved=self._checkpoints_saved,
            stopping=stopping,
            waiting=not self.busy.is_set,
        )

    def _print(self, step: int, words: str) -> None:
        print_stdout(f"step {step}/{self._total_steps}  {words}")


def _wait(seconds: float, check: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        check()
        time.sleep(min(left, WAIT_PIECE_SECONDS))
