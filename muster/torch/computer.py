"""The gradients of a shard, as the user's loop computes them, and the step of the optimizer.

Every shard begins with fresh gradients, with the generators set from (seed, epoch, step, shard) and
with the buffers of the step's beginning. So its bits depend on nothing that a rank computed before.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from muster.collectives.backend import Backend
from muster.program import Contribution, InvalidProgram, State
from muster.torch.body_check import USED, BodyCheck
from muster.torch.refusals import SentGradient, refuse_change, refuse_scaled
from muster.torch.shards import ShardLoader, set_generators
from muster.torch.state import TrainingState
from muster.training.blocks import BusyFlag, Computer, LeafTask, Tasks
from muster.training.schedule import Schedule
from muster.training.schema import GradientSchema, Part
from muster.training.state_sync import Replica

_FLOAT_BYTES: Final = 4

_HOOKS: Final = 1 << 32
"""Takes the place of a shard's number for what happens once a step."""

Hook = Callable[[], object]


class TorchComputer(Computer):
    """Turns the tensors of a user's loop into contributions, and takes steps with them."""

    def __init__(
        self,
        state: TrainingState,
        schedule: Schedule,
        scheduler: Any,  # noqa: ANN401  torch has several base classes
        busy: BusyFlag,
    ) -> None:
        self.before_step: Final[list[Hook]] = []
        self.after_step: Final[list[Hook]] = []
        # This step is the one that is computed; in hooks, and after the loop, the one just done.
        self.steps_done = self.this_step = 0
        self._state: Final = state
        self._scheduler: Final = scheduler
        self._trained: Final = {
            name: it for name, it in state.parameters.items() if it.requires_grad
        }
        self._flags: Final = [(it, it.training) for it in state.model.modules()]
        super().__init__(schedule, self._schema(), ShardLoader(schedule), busy)
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
        self._sent: dict[str, SentGradient] = {}
        self._kept_extra = b""
        self._has_begun = False
        self.body_check: BodyCheck | None = None
        """None if what the body computes is not checked."""

    @property
    def values(self) -> bytes:
        return self._values

    def take_over(self, replica: Replica) -> None:
        self.steps_done, self.this_step = replica.position.step, max(0, replica.position.step - 1)
        self._values = replica.committed.values
        self._state.take_over(self._values)

    # One shard

    def begin(self, task: LeafTask, batch: Any) -> None:  # noqa: ANN401  of the user
        """Prepare everything that the computation of a shard may depend on."""
        if self.body_check is not None:
            self.body_check.begin(task, batch)
        self._task, self.this_step = task, task.leaf.step
        self._kept_buffers = {name: it.clone() for name, it in self._state.buffers.items()}
        for parameter in self._state.parameters.values():
            parameter.grad = None
        self._state.undo_freezing()
        for module, is_training in self._flags:
            module.training = is_training
        self._kept_extra = self._state.extra_state()
        torch.clear_autocast_cache()
        # Again: the items have drawn numbers.
        set_generators(self.schedule, *task.leaf, self._state.generators)

    def backward(self, loss: torch.Tensor, weight: float | None) -> None:
        """Compute the gradients of a shard; raises `InvalidProgram`."""
        task = self._task
        if task is None:
            raise InvalidProgram(
                "run.backward() was called twice for one batch, or outside of the loop over "
                "run.shards(): add losses up and call it once"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidProgram(
                f"the loss {task.leaf} is {_described(loss)}: run.backward() needs one number "
                "with a graph, such as cross_entropy(model(inputs), labels)"
            )
        if any(it.grad is not None for it in self._trained.values()):
            raise InvalidProgram(
                f"there are gradients already {task.leaf}: leave out loss.backward(), "
                "run.backward(loss) computes them"
            )
        task.weight = task.weight if weight is None else float(weight)
        if not 0 <= task.weight < math.inf:
            raise InvalidProgram(
                f"the weight {task.leaf} is {task.weight}: give a number of samples"
            )
        self._task = None
        if self._state.extra_state() != self._kept_extra:
            raise InvalidProgram(
                "what a get_extra_state of the model returns changes in the forward pass, which "
                "runs once for each virtual shard: keep it in a buffer of floats, whose changes "
                "are averaged, or change it in a function given to run.after_step"
            )
        if task.weight == 0:  # a mean over no token is NaN, which must add nothing
            self._restore_buffers()
            self.skip(task)
            return
        # A loss of 16 bits has no room for the weight: its gradients are multiplied.
        is_short = loss.element_size() < _FLOAT_BYTES
        if not self._has_begun:
            refuse_scaled(loss)
            self._has_begun = True
        torch.autograd.backward(loss if is_short else loss * task.weight)
        number = loss.detach().item() * task.weight
        gradients = self._gradients(task.weight, task.weight if is_short else 1.0)
        self._contribute(task, gradients, number)

    def skip(self, task: LeafTask) -> None:
        """Contribute nothing, for a shard without samples or weight."""
        self._contribute(task, dict(self._zeros), 0.0)

    def _contribute(
        self, task: LeafTask, gradients: dict[str, NDArray[np.float32]], loss: float
    ) -> None:
        task.contribution = Contribution(gradients, loss)
        if self.body_check is not None:
            self.body_check.end(task)

    def meet(self, backend: Backend, replica: Replica) -> None:
        if self.body_check is not None:
            self.body_check.meet(backend, replica)

    def check(
        self, backend: Backend, state: State, step: int, check: Callable[[], None]
    ) -> Tasks[None]:
        if self.body_check is not None:
            yield from self.body_check.check(backend, state, step, check)

    def is_kept(self, step: int) -> bool:
        return self.body_check is not None and self.body_check.is_kept(step)

    def _restore_buffers(self) -> None:
        self._state.adopt_buffers()
        for name, buffer in self._state.buffers.items():
            buffer.copy_(self._kept_buffers[name])

    @property
    def is_pending(self) -> bool:
        """Whether a shard was begun and has no gradients yet."""
        return self._task is not None

    def _gradients(self, weight: float, factor: float) -> dict[str, NDArray[np.float32]]:
        gradients, used = {}, np.zeros(len(self._trained), np.float32)
        for place, (name, parameter) in enumerate(self._trained.items()):
            if (gradient := parameter.grad) is None:
                gradients[f"gradient.{name}"] = self._zeros[f"gradient.{name}"]
                continue
            if gradient.is_sparse:
                raise InvalidProgram(
                    f"the gradient of {name!r} is sparse: make its layer with sparse=False"
                )
            gradients[f"gradient.{name}"] = self._array(
                f"gradient.{name}", gradient if factor == 1 else gradient.float() * factor
            )
            used[place] = 1
            if name not in self._sent:
                self._sent[name] = SentGradient.of(parameter)
            parameter.grad = self._sent[name]
        for name, parameter in self._state.parameters.items():
            if parameter.grad is not None and name not in self._trained:
                raise InvalidProgram(
                    f"the parameter {name!r} was frozen at muster.torch.join() and has a gradient "
                    "now: leave it trainable there, and freeze it after that"
                )
        self._state.adopt_buffers()
        for name, buffer in self._state.buffers.items():
            kept = self._kept_buffers[name]
            if torch.equal(buffer, kept):  # a mask may hold infinity, which has no difference
                gradients[f"buffer.{name}"] = self._zeros[f"buffer.{name}"]
                continue
            refuse_change(name, buffer, self._state.buffers)
            # Of a counter that each shard advances by one, the mean is one.
            change = (buffer - kept).float() * weight
            gradients[f"buffer.{name}"] = self._array(f"buffer.{name}", change)
            buffer.copy_(kept)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the copies
        return {**gradients, USED: used}

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
            self._state.loss, weight = self.means[self._end : self._end + 2].tolist()
            if math.isnan(weight):  # 0 / 0
                raise InvalidProgram(
                    f"all weights of step {step} are 0: leave samples that count nothing out of "
                    "the data set, or take larger batches"
                )
            used = self._means[USED]
            for place, (name, parameter) in enumerate(self._trained.items()):
                mean = self._means[f"gradient.{name}"]
                parameter.grad = mean.to(parameter.device, parameter.dtype) if used[place] else None
            for hook in self.before_step:
                hook()
            self._state.step_optimizer()
            if self._scheduler is not None:
                self._scheduler.step()
            for parameter in self._state.parameters.values():
                parameter.grad = None
            for name, buffer in self._state.buffers.items():
                mean = self._means[f"buffer.{name}"]
                if not buffer.is_floating_point():  # weights of tokens leave 0.9999999 of a count
                    mean = mean.round()
                buffer.add_(mean.to(buffer.device, buffer.dtype))
            self.steps_done = step + 1
            for hook in self.after_step:
                hook()
            self._state.adopt_model()
            self._values = self._state.encode()

    def _schema(self) -> GradientSchema:
        shapes = {f"gradient.{name}": tuple(it.shape) for name, it in self._trained.items()}
        shapes |= {f"buffer.{name}": tuple(it.shape) for name, it in self._state.buffers.items()}
        shapes[USED] = (len(self._trained),)
        parts, start = [], 0
        for name in sorted(shapes):
            parts.append(Part(name, shapes[name], start))
            start = parts[-1].stop
        return GradientSchema(parts=tuple(parts), metrics=())


def _described(loss: object) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"a {type(loss).__name__}"
    if loss.numel() != 1:
        return f"a tensor of shape {tuple(loss.shape)}"
    return "a tensor without a graph"
