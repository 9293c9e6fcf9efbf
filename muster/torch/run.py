"""`join`, and the loop over virtual shards.

The body of the loop runs once for each virtual shard that this rank computes: several times a step,
not at all on a rank without a shard, and again when shards are dealt anew after a death.
"""

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import torch
from torch.utils.data import default_collate
from xxhash import xxh3_128

from muster.contracts.environ import JOB_VARIABLES, RankSettings
from muster.contracts.job import Reason
from muster.contracts.messages import PermanentFailure, Ready
from muster.contracts.spec import VIRTUAL_SHARDS_OF_SCRIPTS
from muster.host.trace import stamp
from muster.program import InvalidProgram, refuse_while_loaded
from muster.run import own_job_id
from muster.runtime.agent_client import AgentClient, AgentSocket
from muster.runtime.stderr_messages import flush_streams, print_stderr
from muster.torch.computer import Hook, TorchComputer
from muster.torch.fingerprint import add_to_digest, torch_fingerprint
from muster.torch.shards import totals_of
from muster.torch.state import TrainingState
from muster.training.blocks import BusyFlag
from muster.training.group import group_factory
from muster.training.group_updates import AgentGroupUpdates, GroupUpdates, SingleRankUpdates
from muster.training.rank import keep_freed_memory
from muster.training.replay import Replay
from muster.training.reporter import Reporter
from muster.training.schedule import Schedule
from muster.training.trainer import Outcome, Trainer

BATCH_SIZE: Final = 64
ITEMS_COMPARED: Final = 8

_LEFT_EARLY: Final = (
    "the loop over run.shards() was left before training was complete: its peers would wait. To "
    "end early, end the job (muster stop), or take fewer epochs"
)


class Dataset(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...  # noqa: ANN401


def join(  # noqa: PLR0913  what a training loop has
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    data: Dataset,
    scheduler: Any = None,  # noqa: ANN401  torch has several base classes
    registered: Mapping[str, Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    batch_size: int = BATCH_SIZE,
    epochs: int = 1,
    seed: int = 0,
) -> "Run":
    """Return this process's run; its model and optimizer belong to the run from now on.

    `data` is a map-style data set, `batch_size` the number of samples of a step over all ranks.
    `scheduler` steps once after each step; it and the objects in `registered` (with `state_dict`
    and `load_state_dict`) are part of the state. Fields of the job that are not
    at their defaults replace `batch_size`, `epochs` and `seed`. Raises `InvalidEnvironment` and
    `InvalidProgram`.
    """
    refuse_while_loaded()
    own = {"batch_size": batch_size, "epochs": epochs, "seed": seed}
    given = {name: text for name, text in os.environ.items() if text}
    settings = RankSettings.read(
        {**_own_variables(own), **given}, world_size=1, job_id=own_job_id()
    )
    return Run(settings, model, optimizer, data, registered or {}, scheduler, collate_fn)


def _own_variables(own: Mapping[str, int]) -> dict[str, str]:
    defaults = {name: str(value) for name, value in own.items()}
    defaults |= {"mode": "synchronous", "virtual_shards": str(VIRTUAL_SHARDS_OF_SCRIPTS)}
    return {JOB_VARIABLES[name]: text for name, text in defaults.items()}


class Run:
    """One rank's part in the training of one model."""

    def __init__(
        self,
        settings: RankSettings,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Dataset,
        registered: Mapping[str, Any],
        scheduler: Any,  # noqa: ANN401  see `join`
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        keep_freed_memory()  # each shard has fresh gradients
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        agent, busy = AgentClient(AgentSocket.of(settings)), BusyFlag()
        self.settings: Final = settings
        self._exit_code = 0
        self._is_inside = False
        atexit.register(self._exit_failed)  # called last
        self._data: Final = data
        self._collate: Final = collate_fn
        self._reporter: Final = Reporter(settings, agent, busy)
        supervision = self._reporter.supervision
        supervision.start()
        atexit.register(self._report_early_end)
        with busy:
            if len(data) == 0:
                raise InvalidProgram("the data set is empty")
            objects = dict(registered)
            if scheduler is not None and objects.setdefault("scheduler", scheduler) != scheduler:
                raise InvalidProgram("registered has another 'scheduler': give it another name")
            self._schedule: Final = Schedule(
                totals=totals_of(len(data)),
                batch_size=settings.batch_size,
                virtual_shards=settings.virtual_shards,
                epochs=settings.epochs,
                seed=settings.seed,
                checkpoint_every=settings.checkpoint_every,
            )
            self._state: Final = TrainingState(model, optimizer, objects)
            self._computer: Final = TorchComputer(self._state, self._schedule, scheduler, busy)
        self._reporter.set_schedule(self._state.initial, self._schedule)
        updates: GroupUpdates
        if settings.agent_fd is None:
            updates = SingleRankUpdates(settings.rank, lambda: supervision.is_stopping)
        else:
            updates = AgentGroupUpdates(agent.socket, lambda: supervision.is_stopping)
        groups = group_factory(settings, settings.virtual_shards, self._computer.elements, updates)
        self._trainer: Final = Trainer(
            computer=self._computer,
            replay=Replay(self._computer, settings.replay_every),
            replica=self._state.replica,
            updates=updates,
            groups=groups,
            callbacks=self._reporter,
            arithmetic=torch_fingerprint(self._facts_of_data()),
        )
        self._port: Final = groups.port

    @property
    def rank(self) -> int:
        return self.settings.rank

    @property
    def step(self) -> int:
        """Steps done, equal on all ranks."""
        return max(self._state.replica.position.step, 0)

    @property
    def epoch(self) -> int:
        """The epoch of the next step, counted from 0."""
        return self._schedule.epoch_and_step(self.step)[0]

    @property
    def loss(self) -> float | None:
        """The mean loss of the last step over all ranks; None before this process took one."""
        return self._reporter.loss

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank of its group that saves, and should print."""
        return self._trainer.is_saver

    @property
    def total_steps(self) -> int:
        return self._schedule.total_steps

    @property
    def values(self) -> dict[str, Any]:
        """JSON values of the user that are part of the state; change them in hooks."""
        return self._state.values

    def before_step(self, hook: Hook) -> Hook:
        """Call `hook` once a step on every rank, when every ``.grad`` holds the global mean."""
        self._computer.before_step.append(hook)
        return hook

    def after_step(self, hook: Hook) -> Hook:
        """Call `hook` once a step on every rank, after the optimizer has stepped."""
        self._computer.after_step.append(hook)
        return hook

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Compute the gradients of the present batch; call it once for each.

        `weight` is the batch's share of the mean over all ranks, by default its number of samples:
        give the number of tokens if the loss is a mean over tokens. Raises `InvalidProgram`.
        """
        self._computer.backward(loss, weight)

    def shards(self) -> Iterator[Any]:
        """Yield the batches that this rank computes, until training is complete.

        Ends the process with exit code 0 when this rank is asked to stop or to leave.
        """
        stamp("rank ready")
        self._reporter.supervision.send(Ready(port=self._port))
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
            self._computer.begin(task)
            batch = self._collate([self._data[int(number)] for number in task.batch])
            self._computer.seed(task.leaf.step, task.leaf.shard)  # whatever items have drawn
            self._is_inside = True
            yield batch
            self._is_inside = False
            if self._computer.is_pending:
                raise InvalidProgram(
                    f"no gradient was computed {task.leaf}: call run.backward(loss) once for "
                    "each batch, with weight 0 if it has nothing to learn from"
                )
        self._reporter.print_outcome(outcome)
        if outcome is not Outcome.DONE:
            raise SystemExit(0)

    def _facts_of_data(self) -> dict[str, str]:
        """Return what must be equal on all ranks: the number of samples, and eight of them."""
        places = [place * len(self._data) // ITEMS_COMPARED for place in range(ITEMS_COMPARED)]
        digest = xxh3_128()
        for place in places:
            self._computer.seed(0, place)
            add_to_digest(digest, self._data[place])
        return {"the data set": f"of {len(self._data)} samples, {digest.hexdigest()[:8]}"}

    def _report_early_end(self) -> None:
        """Fail the job if the loop was left without an error, by ``break`` for example."""
        if self._is_inside and not self._reporter.supervision.has_failed:
            failure = PermanentFailure(reason=Reason.INVALID_PROGRAM, message=_LEFT_EARLY)
            self._reporter.supervision.send_waiting(failure)
            print_stderr(f"muster: {_LEFT_EARLY}")
            self._exit_code = 1

    def _exit_failed(self) -> None:
        if self._exit_code:
            flush_streams()
            os._exit(self._exit_code)
