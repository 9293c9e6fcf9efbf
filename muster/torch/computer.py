"""The gradients of a shard, as the user's loop computes them, and the step of the optimizer.

Every shard begins with fresh gradients, with the generators set from (seed, epoch, step, shard) and
with the buffers of the step's beginning. So its bits depend on nothing that a rank computed before.

Optimizers that are named by ``run.backward(loss, of=optimizer)`` take their steps in turns. In each
turn the body runs for all shards, only the losses of one optimizer are computed backwards, and then
that one steps. Everything else that belongs to a step happens once, in the last turn.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from muster.program import Contribution, InvalidProgram, State
from muster.runtime.stderr_messages import print_stderr
from muster.torch.body_check import USED
from muster.torch.refusals import (
    AVERAGED,
    SentGradient,
    parameters_of,
    refuse_change,
    refuse_evaluation,
    refuse_scaled,
)
from muster.torch.shards import ShardLoader, set_generators
from muster.torch.state import TrainingState
from muster.training.blocks import BusyFlag, Computer, LeafTask
from muster.training.groups.state_sync import Replica
from muster.training.schedule import Schedule
from muster.training.schema import GradientSchema, Part

_FLOAT_BYTES: Final = 4

NAMED: Final = "named"
"""The part of a contribution that counts the shards whose losses name their optimizer."""

_GRADIENT: Final = "gradient."

_HOOKS: Final = 1 << 32
"""Takes the place of a shard's number for what happens once a step."""

Hook = Callable[[], object]


class TorchComputer(Computer):
    """Turns the tensors of a user's loop into contributions, and takes steps with them."""

    def __init__(
        self,
        state: TrainingState,
        schedule: Schedule,
        schedulers: Sequence[Any],  # torch has several base classes
        busy: BusyFlag,
    ) -> None:
        self.before_step: Final[list[Hook]] = []
        self.after_step: Final[list[Hook]] = []
        # This step is the one that is computed; in hooks, and after the loop, the one just done.
        self.steps_done = self.this_step = 0
        self._state: Final = state
        self._schedulers: Final = schedulers
        self._warn: Callable[[str], None] = print_stderr  # until the loop begins
        self._averaged: Final[set[str]] = set()
        """The buffers that a warning has named."""
        self._trained: Final = {
            name: param for name, param in state.parameters.items() if param.requires_grad
        }
        self._modes: dict[torch.nn.Module, bool] = {}
        """Whether each module was in training mode when the loop began."""
        super().__init__(schedule, self._schema(), ShardLoader(schedule), busy)
        self.compressed_elements = sum(param.numel() for param in self._trained.values())
        views = {part.name: part for part in self.schema.parts}
        self._means: Final = {
            name: torch.from_numpy(self.means[part.start : part.stop].reshape(part.shape))
            for name, part in views.items()
        }
        self._zeros: Final = {
            part.name: np.zeros(part.shape, np.float32) for part in self.schema.parts
        }
        self._values = b""
        self._kept_buffers: dict[str, torch.Tensor] = {}
        self._staging: dict[str, torch.Tensor] = {}
        """Memory for gradients that come from a GPU."""
        self._task: LeafTask | None = None
        """The shard that the body computes at present."""
        self._others: Final[WeakKeyDictionary[Optimizer, LeafTask]] = WeakKeyDictionary()
        """Optimizers that only the body has, and the first shard for which each has stepped."""
        register_optimizer_step_pre_hook(self._refuse_other)
        self._is_named: bool | None = None
        """Whether losses name their optimizer, once that is known."""
        self._served: list[int] = []
        """The turns of the losses that the present body has given."""
        self._gradients: dict[str, torch.Tensor] = {}
        """Of the losses whose turn it is, as their weight and their sum."""
        self._loss = 0.0
        self._stepped: Final[set[int]] = set()
        """The turns in which an optimizer has stepped."""
        self._losses: list[float] = []
        """The means of the turns that are over."""
        self._sent: Final = {name: SentGradient.of(param) for name, param in self._trained.items()}
        self._kept_extra = b""
        self._has_begun = False

    @property
    def values(self) -> bytes:
        return self._values

    def take_over(self, replica: Replica) -> None:
        self.steps_done, self.this_step = replica.position.step, max(0, replica.position.step - 1)
        self._values = replica.committed.values
        self._state.take_over(self._values)
        self.checks.take_over()

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Go back to what training began with, and then to the present state."""
        present, self.steps_done = self.steps_done, 0
        try:
            with self._state.beginning(self._values):
                yield
        finally:
            self.steps_done = present

    def begin_loop(self, warn: Callable[[str], None]) -> None:
        """Note what the script has prepared."""
        self._warn = warn
        self._modes = {module: module.training for module in self._state.model.modules()}

    # One shard

    def begin(self, task: LeafTask, batch: Any) -> None:  # noqa: ANN401  of the user
        """Prepare everything that the computation of a shard may depend on."""
        self.checks.begin(task, batch)
        self._task, self.this_step = task, task.leaf.step
        self._served, self._gradients, self._loss = [], {}, 0.0
        self._kept_buffers = {name: buffer.clone() for name, buffer in self._state.buffers.items()}
        for parameter in self._state.parameters.values():
            parameter.grad = None
        self._state.undo_freezing()
        for module, is_training in self._modes.items():
            module.training = is_training
        self._kept_extra = self._state.extra_state()
        torch.clear_autocast_cache()
        # Again: the items have drawn numbers.
        set_generators(self.schedule, *task.leaf, self._state.generators)

    def backward(self, loss: torch.Tensor, weight: float | None, of: Optimizer | None) -> None:
        """Compute gradients of a shard, if it is the turn of `of`; raises `InvalidProgram`."""
        task = self._task
        if task is None or (self._served and of is None and not self._is_named):
            raise InvalidProgram(
                "run.backward() was called twice for one batch, or outside of the loop over "
                "run.shards(): add losses up and call it once"
            )
        self._served.append(self._turn_of(of))
        weight = float(len(task.batch) if weight is None else weight)
        self._check_loss(loss, weight, task)
        if self._served[-1] != self.turn:
            return
        task.weight = weight
        if weight == 0:  # a mean over no token is NaN, which must add nothing
            return
        # A loss of 16 bits has no room for the weight: its gradients are multiplied.
        is_short = loss.element_size() < _FLOAT_BYTES
        for parameter in self._trained.values():
            parameter.grad = None
        inputs = (
            None if of is None else [param for param in parameters_of(of) if param.requires_grad]
        )
        if inputs != []:
            torch.autograd.backward(loss if is_short else loss * weight, inputs=inputs)
        if inputs is not None and all(param.grad is None for param in inputs):
            raise InvalidProgram(
                f"a loss {task.leaf} has no gradient for any parameter of the optimizer that "
                "run.backward(of=…) names: name the optimizer of the model that it trains"
            )
        self._loss += loss.detach().item() * weight
        self._collect(weight if is_short else 1.0)

    def _check_loss(self, loss: torch.Tensor, weight: float, task: LeafTask) -> None:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidProgram(
                f"the loss {task.leaf} is {_described(loss)}: run.backward() needs one number "
                "with a graph, such as cross_entropy(model(inputs), labels)"
            )
        for name, parameter in self._trained.items():
            if parameter.grad is None:
                if self._served[-1] == self.turn:  # the body has zeroed what an earlier loss gave
                    self._gradients.pop(name, None)
            elif parameter.grad is not self._sent[name]:
                raise InvalidProgram(
                    f"there are gradients already {task.leaf}: leave out loss.backward(), "
                    "run.backward(loss) computes them"
                )
        if not self._has_begun:
            refuse_scaled(loss)
            self._has_begun = True
        if not 0 <= weight < math.inf:
            raise InvalidProgram(f"the weight {task.leaf} is {weight}: give a number of samples")
        if self._served[-2:] == [self.turn, self.turn] and weight != task.weight:
            raise InvalidProgram(
                f"the weight {task.leaf} is {weight} and was {task.weight} for an earlier loss of "
                "the same optimizer: give the same to each"
            )

    def _turn_of(self, of: Optimizer | None) -> int:
        """Return the turn in which a loss is computed backwards, 0 if it is of all optimizers."""
        turns = self._state.optimizers
        is_named = of is not None and len(turns) > 1
        if self._is_named not in {None, is_named} or of not in {None, *turns}:
            raise InvalidProgram(
                "run.backward(of=…) names one of the optimizers that muster.torch.join() has, for "
                "each loss; without of=…, for all losses, they step together"
            )
        self._is_named, turn = is_named, turns.index(of) if of is not None else 0
        if self._served and turn < self._served[-1]:
            raise InvalidProgram(
                "the body calls run.backward(of=…) in another order than the optimizers have at "
                "muster.torch.join(), in which they step: give them there in the order of the body"
            )
        return turn

    def _collect(self, factor: float) -> None:
        """Take the gradients of a loss away from the parameters, and add them to earlier ones."""
        for name, parameter in self._state.parameters.items():
            if (gradient := parameter.grad) is None:
                continue
            if name not in self._trained:
                raise InvalidProgram(
                    f"the parameter {name!r} was frozen at muster.torch.join() and has a gradient "
                    "now: leave it trainable there, and freeze it after that"
                )
            if gradient.is_sparse:
                raise InvalidProgram(
                    f"the gradient of {name!r} is sparse: make its layer with sparse=False"
                )
            gradient = gradient if factor == 1 else gradient.float() * factor
            earlier = self._gradients.get(name)
            self._gradients[name] = gradient if earlier is None else earlier + gradient
        for name in self._gradients:
            self._trained[name].grad = self._sent[name]

    def _refuse_other(self, optimizer: Optimizer, *_: object) -> None:
        """Refuse an optimizer that is not ours and takes steps in one body after another."""
        if self._task is None or optimizer in self._state.optimizers:
            return
        if self._others.setdefault(optimizer, self._task) is not self._task:
            raise InvalidProgram(
                f"an optimizer that muster.torch.join() does not have, {type(optimizer).__name__}, "
                "steps in the loop, whose body runs once for each virtual shard: give it and its "
                'model to join(), as "Several optimizers" in docs/pytorch.md shows'
            )

    def finish(self, task: LeafTask) -> None:
        """Contribute what the body has computed of a shard; raises `InvalidProgram`."""
        self._task = None
        if not self._served:
            raise InvalidProgram(
                f"no gradient was computed {task.leaf}: call run.backward(loss) once for each "
                "batch, with weight 0 if it has nothing to learn from; a larger batch_size takes "
                "the place of accumulating gradients"
            )
        if self._state.extra_state() != self._kept_extra:
            raise InvalidProgram(
                "what a get_extra_state of the model returns changes in the forward pass, which "
                "runs once for each virtual shard: keep it in a buffer of floats, whose changes "
                "are averaged, or change it in a function given to run.after_step"
            )
        found = dict(self._zeros)
        found[NAMED] = np.array([self._is_named], np.float32)
        if task.weight:
            found[USED] = np.array([name in self._gradients for name in self._trained], np.float32)
            for name, gradient in self._gradients.items():
                found[f"{_GRADIENT}{name}"] = self._array(f"{_GRADIENT}{name}", gradient)
        found |= self._reset_buffers(task.weight * self._is_last(is_named=self._is_named))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies
        self._gradients = {}
        self._contribute(task, found, self._loss)

    def _is_last(self, *, is_named: bool | None) -> bool:
        """Return whether a step ends with the present turn."""
        return not is_named or self.turn == len(self._state.optimizers) - 1

    def skip(self, task: LeafTask) -> None:
        """Contribute nothing, for a shard without samples or weight."""
        self._contribute(task, dict(self._zeros), 0.0)

    def _contribute(
        self, task: LeafTask, gradients: dict[str, NDArray[np.float32]], loss: float
    ) -> None:
        task.contribution = Contribution(gradients, loss)
        self.checks.end(task)

    def _reset_buffers(self, weight: float) -> dict[str, NDArray[np.float32]]:
        """Undo what the body has added to buffers, and return it unless it has no weight."""
        changes = {}
        self._state.adopt_buffers()
        for name, buffer in self._state.buffers.items():
            kept = self._kept_buffers[name]
            if torch.equal(buffer, kept):  # a mask may hold infinity, which has no difference
                continue
            if weight:
                refuse_change(name, buffer, self._state.buffers)
                # Of a counter that each shard advances by one, the mean is one.
                self._warn_of_mean(name)
                change = (buffer - kept).float() * weight
                changes[f"buffer.{name}"] = self._array(f"buffer.{name}", change)
            buffer.copy_(kept)
        return changes

    def _warn_of_mean(self, name: str) -> None:
        """Warn once of a buffer of the user's own that the forward pass changes."""
        if name.rpartition(".")[2] not in AVERAGED and name not in self._averaged:
            self._averaged.add(name)
            self._warn(
                f"the buffer {name!r} changes in the forward pass: it gets the mean of the changes "
                "of all virtual shards, as the statistics of a BatchNorm do"
            )

    def _array(self, name: str, tensor: torch.Tensor) -> NDArray[np.float32]:
        """Return the numbers of a tensor; those of a GPU are there once it is synchronized."""
        plain = tensor.detach().float().contiguous()
        if self._state.is_staged(tensor):
            # The adder has copied or added the last ones.
            if name not in self._staging:
                pins = tensor.is_cuda  # pinned memory is copied to without the processor
                self._staging[name] = torch.empty(plain.shape, pin_memory=pins)
            plain = self._staging[name].copy_(plain, non_blocking=True)
        array: NDArray[np.float32] = plain.numpy()
        return array

    # One step

    def update(self, state: State, gradients: State, step: int, target: State) -> None:  # noqa: ARG002
        """Step the optimizer with the means of all shards, in place."""
        with self._busy:
            self.this_step = step
            set_generators(self.schedule, step, _HOOKS, self._state.generators)
            self._state.undo_freezing()
            if not self._take_turn(step):
                self.turn += 1
                return
            self.turn, self._state.losses, self._losses = 0, self._losses, []
            self.checks.end_step()
            for scheduler in self._schedulers:
                scheduler.step()
            for name, buffer in self._state.buffers.items():
                mean = self._means[f"buffer.{name}"]
                if not buffer.is_floating_point():  # weights of tokens leave 0.9999999 of a count
                    mean = mean.round()
                buffer.add_(mean.to(buffer.device, buffer.dtype))
            self.steps_done = step + 1
            places = self._places()
            for hook in self.after_step:
                hook()
            if self._places() != places:
                raise InvalidProgram(
                    "a scheduler steps in a hook, and after each step because it was given to "
                    "muster.torch.join(scheduler=…): give it to run.register() instead"
                )
            refuse_evaluation(self._state.model, self._modes)
            self._state.adopt_model()
            self._values = self._state.encode()

    def _places(self) -> list[object]:
        """Return how far the schedulers are."""
        return [getattr(scheduler, "last_epoch", None) for scheduler in self._schedulers]

    def _take_turn(self, step: int) -> bool:
        """Let one optimizer step, or all; return whether this ends the step."""
        loss, weight = self.means[self._end : self._end + 2].tolist()
        if math.isnan(weight):  # 0 / 0
            raise InvalidProgram(
                f"all weights of step {step} are 0: leave samples that count nothing out of "
                "the data set, or take larger batches"
            )
        used = self._means[USED]
        for place, (name, parameter) in enumerate(self._trained.items()):
            mean = self._means[f"{_GRADIENT}{name}"]
            parameter.grad = mean.to(parameter.device, parameter.dtype) if used[place] else None
        # The sum tells, as a rank without a shard has not run the body.
        is_named = bool(self._means[NAMED])
        is_last = self._is_last(is_named=is_named)
        if is_named and self.before_step:
            raise InvalidProgram(
                "run.before_step calls a function once a step, and optimizers that step in turns "
                "have their gradients one after the other: give it to register_step_pre_hook of "
                "one optimizer instead"
            )
        if self.turn == 0 and not is_last:
            self._state.keep()
        for hook in self.before_step:
            hook()
        if used.any():
            self._stepped.add(self.turn)
            self._state.step_optimizer(self.turn if is_named else None)
        elif step + 1 == self.schedule.steps_per_epoch and self.turn not in self._stepped:
            self._warn(
                f"{type(self._state.optimizers[self.turn]).__name__}, number {self.turn + 1} of "
                "the optimizers of join(), got no loss in this epoch: does run.backward(of=…) "
                "name the right one?"
            )
        for parameter in self._state.parameters.values():
            parameter.grad = None
        self._losses.append(loss)
        if not is_last:
            self._state.adopt_model()
        return is_last

    def undo_turns(self) -> None:
        self.turn, self._losses = 0, []
        self._state.undo(self._values)

    def _schema(self) -> GradientSchema:
        shapes = {f"{_GRADIENT}{name}": tuple(param.shape) for name, param in self._trained.items()}
        shapes |= {
            f"buffer.{name}": tuple(buffer.shape) for name, buffer in self._state.buffers.items()
        }
        shapes |= {USED: (len(self._trained),), NAMED: (1,)}
        parts, start = [], 0
        # Gradients first: what follows them is never compressed.
        for name in sorted(shapes, key=lambda name: (not name.startswith(_GRADIENT), name)):
            parts.append(Part(name, shapes[name], start))
            start = parts[-1].stop
        return GradientSchema(parts=tuple(parts), metrics=())


def _described(loss: object) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    if loss.numel() != 1:
        return f"a tensor of shape {tuple(loss.shape)}"
    return "a tensor without a graph"
