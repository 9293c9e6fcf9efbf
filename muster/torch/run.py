"""`join`, and the loop over virtual shards.

The body of the loop runs once for each virtual shard that this rank computes: several times a step,
not at all on a rank without a shard, and again when shards are dealt anew after a death.
"""

import atexit
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from threading import Event
from types import MappingProxyType
from typing import Any, Final

import torch
from msgspec.structs import replace
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import default_collate

from muster.contracts.job.field_types import (
    COMPRESSION_WANTED,
    VIRTUAL_SHARDS_OF_SCRIPTS,
    is_compression,
)
from muster.contracts.job.problems import batch_size_problem
from muster.contracts.job.status import Reason
from muster.contracts.messages.rank import LoopEnded, PermanentFailure
from muster.contracts.series import LOSS
from muster.contracts.settings.environ import JOB_VARIABLES, RankSettings
from muster.contracts.settings.names import PROCESS_TAG
from muster.host.containment import contain_self
from muster.program import InvalidProgram, refuse_while_loaded
from muster.run import own_job_id
from muster.runtime.agent_client import AgentClient, AgentSocket
from muster.runtime.exit_report import exit_process
from muster.runtime.stderr_messages import flush_streams, print_stderr
from muster.torch.body_check import BodyCheck
from muster.torch.computer import Hook, TorchComputer
from muster.torch.fingerprint import facts_of, torch_fingerprint
from muster.torch.refusals import OneOrMore, listed
from muster.torch.shards import (
    Batches,
    Dataset,
    Prefetcher,
    aligned,
    sampler_of,
    schedule_of,
)
from muster.torch.state import TrainingState
from muster.training.blocks import BusyFlag, LeafTask
from muster.training.reporter import Reporter
from muster.training.start import keep_freed_memory, ready_trainer, wait_for_order
from muster.training.trainer import Outcome, Trainer

BATCH_SIZE: Final = 64

_HAS_JOINED: Final = Event()  # set once this process has

_LEFT_EARLY: Final = (
    "the loop over run.shards() was left before training was complete: its peers would wait. Call "
    "run.stop() to end early, and let the loop go on until it ends"
)


def join(  # noqa: PLR0913  what a training loop has
    model: OneOrMore[Module],
    optimizer: OneOrMore[Optimizer],
    *,
    data: Dataset,
    scheduler: Any = None,  # noqa: ANN401  torch has several base classes
    sampler: Iterable[int] | Callable[[int], Iterable[int]] | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    num_workers: int = 0,
    batch_size: int = BATCH_SIZE,
    drop_last: bool = False,
    epochs: int = 1,
    seed: int = 0,
    compression: str | None = None,
    compression_groups: int | None = None,
    check: bool = True,
) -> "Run":
    """Return this process's run; its model and optimizer belong to the run from now on.

    Several models are given as a list, and so are several optimizers, which have each parameter
    once; see `Run.backward`. `data` is a map-style data set, `batch_size` the number of samples of
    a step over all ranks. `num_workers` processes make batches ahead. With `drop_last`, an epoch
    leaves out the samples that do not fill its last batch. `scheduler`, or each of a list, steps
    once after each step and is part of the state. `sampler` gives the numbers of an epoch's samples
    in their order: a sampler of torch, or a function of the epoch's number; without it every sample
    comes once, in a random order. `compression` is how gradients are sent between hosts: "int8",
    "bf16", "fp16" or "random:0.1", which sends a tenth; they are rounded in `compression_groups`
    (docs/training.md). Fields of the job that are not at their defaults replace `batch_size`,
    `epochs`, `seed` and these two.
    `check=False` leaves unchecked whether the body of the loop gives the same bits each time; the
    job says so. A spare process waits here until it replaces a rank. Raises `InvalidEnvironment`
    and `InvalidProgram`.
    """
    refuse_while_loaded()
    if _HAS_JOINED.is_set():
        raise InvalidProgram(
            "muster.torch.join() was called before in this process, which trains one model, once: "
            "train another one in a job of its own"
        )
    _HAS_JOINED.set()
    own: dict[str, object] = {"epochs": epochs, "seed": seed}
    refusal = ""
    if compression is not None:
        if is_compression(compression):
            own |= {"compression": compression, "compression_groups": compression_groups or ""}
        else:
            refusal = f"join(compression={compression!r}): {COMPRESSION_WANTED}"
    own_variables = {JOB_VARIABLES[name]: str(value) for name, value in own.items()}
    own_variables[JOB_VARIABLES["mode"]] = "synchronous"
    own_variables[JOB_VARIABLES["virtual_shards"]] = str(VIRTUAL_SHARDS_OF_SCRIPTS)
    own_variables[JOB_VARIABLES["checkpoint_every"]] = "auto"

    def read_settings() -> RankSettings:
        given = {name: text for name, text in os.environ.items() if text}
        return RankSettings.read({**own_variables, **given}, world_size=1, job_id=own_job_id())

    return Run(
        read_settings,
        model,
        optimizer,
        data,
        scheduler=scheduler,
        sampler=sampler,
        collate=collate_fn,
        batch_size=batch_size,
        num_workers=num_workers,
        drop_last=drop_last,
        check=check,
        refusal=refusal,
    )


class Run:
    """One rank's part in the training of one model."""

    def __init__(  # noqa: PLR0913  see `join`
        self,
        read_settings: Callable[[], RankSettings],
        model: OneOrMore[Module],
        optimizer: OneOrMore[Optimizer],
        data: Dataset,
        *,
        scheduler: Any,  # noqa: ANN401
        sampler: Iterable[int] | Callable[[int], Iterable[int]] | None,
        collate: Callable[[list[Any]], Any],
        batch_size: int,
        num_workers: int,
        drop_last: bool,
        check: bool,
        refusal: str,
    ) -> None:
        keep_freed_memory()  # each shard has fresh gradients
        threads = os.environ.get("OMP_NUM_THREADS") or "1"
        torch.set_num_threads(int(threads.partition(",")[0]))  # one number for each nesting level
        self.settings = read_settings()
        self._agent: Final = AgentClient(AgentSocket.of(self.settings))
        self._busy: Final = BusyFlag()
        self._is_checked: Final = check
        self._exit_code = 0
        self._is_inside = False
        self._pid: Final = os.getpid()
        self._trainer: Trainer | None = None
        self._exporter: int | None = None  # once the loop is over
        atexit.register(self._exit_failed)  # called last
        if not (was_spare := self.settings.is_spare):
            self._start_supervision()
        with self._busy:
            if refusal:
                raise InvalidProgram(refusal)
            if self.settings.mode != "synchronous":
                raise InvalidProgram(
                    "the ranks of this script train one model, those of its job one each: submit "
                    "or run it with --elastic"
                )
            if not os.environ.get(JOB_VARIABLES["batch_size"]):
                if problem := batch_size_problem(batch_size, self.settings.virtual_shards):
                    raise InvalidProgram(f"join(batch_size={batch_size}): it {problem}")
                self.settings = replace(self.settings, batch_size=batch_size)
            order = sampler_of(sampler, data, self.settings.seed)
            samples = len(data if order is None else order)
            self._schedule: Final = schedule_of(self.settings, samples, drop_last=drop_last)
            self._state: Final = TrainingState(model, optimizer)
            if self._state.device.type == "cuda":
                # What has no deterministic implementation raises an error that names it.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                torch.use_deterministic_algorithms(True)  # noqa: FBT003  theirs
            schedulers = [] if scheduler is None else listed(scheduler)
            for number, obj in enumerate(schedulers):
                self._state.register(f"scheduler{number or ''}", obj)
            self._computer: Final = TorchComputer(
                self._state, self._schedule, schedulers, self._busy
            )
            if num_workers and torch.get_num_threads() > 1:
                raise InvalidProgram(
                    "num_workers needs OMP_NUM_THREADS=1: forks of a process with threads may hang"
                )
            self._batches: Final = Batches(
                self._schedule, data, collate, order, self._state.generators
            )
            self._workers: Final = num_workers
            facts = facts_of(self._state.model, data, self._schedule, order)
            self._arithmetic: Final = torch_fingerprint(self._state.device, facts)
        if was_spare:
            wait_for_order(self._agent)
            self.settings = read_settings()
            self._start_supervision()
            contain_self(os.environ[PROCESS_TAG])

    def _start_supervision(self) -> None:
        self._reporter = Reporter(self.settings, self._agent, self._busy)
        self._reporter.supervision.start()
        atexit.register(self._report_early_end)

    @property
    def rank(self) -> int:
        return self.settings.rank

    @property
    def step(self) -> int:
        """Steps done, equal on all ranks; hooks of `after_step` count the present one."""
        return self._computer.steps_done

    @property
    def epoch(self) -> int:
        """The epoch of the present step, counted from 0, as checkpoints count it.

        That is in the body of the loop the step computed, in a hook the one just done.
        """
        return self._schedule.epoch_and_step(self._computer.this_step)[0]

    @property
    def loss(self) -> float | None:
        """The mean loss of the last step over all ranks; None before the first one."""
        return self.losses[-1] if self.losses else None

    @property
    def losses(self) -> Sequence[float]:
        """The mean loss of each optimizer that has stepped in a turn of the last step."""
        return self._state.losses

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank of its group that saves, and should print.

        After the loop: whether it is the one whose end the job waits for, and should export.
        """
        if self._exporter is not None:
            return self.rank == self._exporter
        return self._trainer is not None and self._trainer.is_saver

    @property
    def total_steps(self) -> int:
        return self._schedule.total_steps

    @property
    def steps_per_epoch(self) -> int:
        return self._schedule.steps_per_epoch

    @property
    def values(self) -> MutableMapping[str, Any] | Mapping[str, Any]:
        """JSON values of the user that are part of the state; in the loop they are read-only."""
        values = self._state.values
        return MappingProxyType(values) if self._is_inside else values

    def before_step(self, hook: Hook) -> Hook:
        """Call `hook` once a step on every rank, when every ``.grad`` holds the global mean."""
        self._computer.before_step.append(hook)
        return hook

    def after_step(self, hook: Hook) -> Hook:
        """Call `hook` once a step on every rank, after the optimizer has stepped."""
        self._computer.after_step.append(hook)
        return hook

    def register(self, **objects: Any) -> None:  # noqa: ANN401
        """Make objects with `state_dict` and `load_state_dict` part of the state, by name.

        Generators of torch, numpy and `random` are set for each shard instead, as the global ones.
        To be called before the loop. Raises `InvalidProgram`.
        """
        for name, obj in objects.items():
            self._state.register(name, obj)

    def backward(
        self, loss: torch.Tensor, weight: float | None = None, *, of: Optimizer | None = None
    ) -> None:
        """Compute the gradients of the present batch; call it once for each.

        `weight` is the batch's share of the mean over all ranks, by default its number of samples:
        give the number of tokens if the loss is a mean over tokens. With `of`, one of several
        optimizers, the optimizers step in turns, each with the gradients of its own parameters; it
        may then be called several times, and gradients add up. Raises `InvalidProgram`.
        """
        self._computer.backward(loss, weight, of)

    def report(self, **metrics: float) -> None:
        """Report what this rank has measured, such as ``val_loss``, in a hook or after the loop.

        At most 64 names of up to 128 characters are shown. Raises `InvalidProgram`.
        """
        if LOSS in metrics:
            raise InvalidProgram(
                "run.report(loss=…): training reports it, take another name, such as val_loss"
            )
        if self._is_inside or self._trainer is None:
            raise InvalidProgram(
                "call run.report() in a hook of run.after_step, or after the loop: its body runs "
                "several times a step"
            )
        self._reporter.report(self.step, metrics)

    def stop(self) -> None:
        """End training on all ranks after the same step; the job is then complete.

        Called in the body of the loop, the present step is the last one; called in a hook, the next
        one. A hook should decide by what all ranks have, such as `loss`: the request of one rank
        alone is lost if that rank dies before the next step.
        """
        if self._trainer is None:
            raise InvalidProgram("call run.stop() inside the loop over run.shards(), or in a hook")
        self._trainer.stop_requested = True

    def shards(self) -> Iterator[Any]:
        """Yield the batches that this rank computes, until training is complete.

        Ends the process with exit code 0 when this rank is asked to stop or to leave.
        """
        if self._trainer is not None:
            raise InvalidProgram(
                "run.shards() covers all epochs: give epochs=… to muster.torch.join(), and leave "
                "out the loop over epochs"
            )
        with self._busy:
            values = self._state.allocate()
            read = self._batches.make
            if self._workers:
                read = Prefetcher(self._batches, self._workers, self._schedule).read
        self._reporter.set_schedule(self._state.initial, self._schedule, values)
        self._reporter.is_unchecked = not self._is_checked
        if self._is_checked:
            self._computer.checks = BodyCheck(
                self._computer,
                self._reporter,
                self._state.digests,
                self._computer.beginning,
                is_fatal=self.settings.bits == "same",
                is_gpu=self._state.device.type == "cuda",
            )
        self._computer.begin_loop(self._reporter.supervision.warn)
        self._trainer = ready_trainer(
            self.settings,
            self._agent,
            self._reporter,
            self._computer,
            self._state.replica,
            self._arithmetic,
        )
        tasks = self._trainer.train()
        while True:
            try:
                task = next(tasks)
            except StopIteration as end:
                outcome: Outcome = end.value
                break
            if not len(task.batch):
                self._computer.skip(task)
                continue
            batch = aligned((self._batches.make if task.is_again else read)(task.leaf, task.batch))
            self._begin(task, batch)
            rates = self._state.options()
            self._is_inside = True
            yield batch
            self._is_inside = False
            if self._state.options() != rates:
                raise InvalidProgram(
                    "the loop changes the learning rate, or another option, of the optimizer, and "
                    "its body runs once for each virtual shard: leave out scheduler.step(), give "
                    "scheduler=… to muster.torch.join(), or change it in run.after_step"
                )
            self._computer.finish(task)
        self._end(self._trainer, outcome)

    def _begin(self, task: LeafTask, batch: Any) -> None:  # noqa: ANN401  of the user
        here = self.settings.rank, self.settings.restart_count, self.step
        if self.settings.is_killed_in_check and here == (1, 0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        self._computer.begin(task, batch)

    def _end(self, trainer: Trainer, outcome: Outcome) -> None:
        """Let the script go on after its loop, if that is wanted."""
        self._reporter.end(outcome, f"; {trainer.costs}" if self._is_checked else "")
        if self.settings.check_steps is not None:  # files of the user stay as they are
            exit_process(0)
        if outcome is not Outcome.DONE:
            raise SystemExit(0)
        self._exporter = trainer.exporter
        self._reporter.supervision.send_waiting(LoopEnded(exporter=self._exporter))

    def _report_early_end(self) -> None:
        """Fail the job if the loop was left without an error, by ``break`` for example."""
        is_ours = os.getpid() == self._pid  # a fork of the program has a copy of our handlers
        if self._is_inside and is_ours and not self._reporter.supervision.has_failed:
            failure = PermanentFailure(reason=Reason.INVALID_PROGRAM, message=_LEFT_EARLY)
            self._reporter.supervision.send_waiting(failure)
            print_stderr(f"muster: {_LEFT_EARLY}")
            self._exit_code = 1

    def _exit_failed(self) -> None:
        if self._exit_code:
            flush_streams()
            os._exit(self._exit_code)
