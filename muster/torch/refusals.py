"""What of a script cannot be shared among ranks that come and go, in words that name the cure."""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Module
from torch.optim import Optimizer

from muster.checkpoints.format import DTYPES
from muster.program import InvalidProgram

T = TypeVar("T")
OneOrMore: TypeAlias = T | Sequence[T]

EXTRA_STATE: Final = "_extra_state"
"""How torch names what `get_extra_state` returns in a `state_dict()`."""

_NAMES: Final = frozenset({*(np.dtype(name).name for name in DTYPES), "bfloat16", "complex64"})
"""Of the kinds of numbers that a state can hold."""

COUNTER: Final = "num_batches_tracked"
"""The counter of a BatchNorm: each shard adds as many as the next."""

AVERAGED: Final = frozenset({"running_mean", "running_var", COUNTER})
"""The buffers of a BatchNorm, which are meant to be averaged."""

_QUANTIZER: Final = ("zero_point", "scale")
"""A whole number that the forward pass of a fake quantizer takes from its observer's floats."""

SCALES_FROM: Final = 15
"""The power of two at which a factor of the loss is a GradScaler's, which begins with 2^16."""


def names_of(parameters: Mapping[str, torch.Tensor], optimizers: Sequence[Optimizer]) -> list[str]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: list[str] = []
    for parameter in parameters_of(*optimizers):
        name = names.get(id(parameter))
        if name is None:
            raise InvalidProgram(
                "the optimizer has a parameter that the model does not have: make the optimizer of "
                "model.parameters()"
            )
        if name in found:
            raise InvalidProgram(
                f"two optimizers have the parameter {name!r}: give each parameter to one of them"
            )
        found.append(name)
    left = [n for n, param in parameters.items() if param.requires_grad and n not in found]
    if left:
        raise InvalidProgram(
            f"the optimizer does not have the parameter {left[0]!r}: give it to an optimizer, or "
            "freeze it with requires_grad_(False)"
        )
    return found


def parameters_of(*optimizers: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of optimizers in their order."""
    return [param for opt in optimizers for group in opt.param_groups for param in group["params"]]


def model_of(given: OneOrMore[Module]) -> Module:
    """Return the model that a script trains, or one made of several; raises `InvalidProgram`."""
    models = listed(given)
    for model in models:
        if not isinstance(model, Module):
            raise InvalidProgram(f"the model is a {type(model).__name__}: give a torch.nn.Module")
        parallel = torch.nn.parallel
        if isinstance(model, parallel.DistributedDataParallel | parallel.DataParallel):
            raise InvalidProgram(
                f"the model is in a {type(model).__name__}, which would add up gradients, too: "
                "give the model itself, and leave out init_process_group()"
            )
        for name, value in model.state_dict().items():
            if not (name.endswith(EXTRA_STATE) or isinstance(value, torch.Tensor)):
                raise InvalidProgram(
                    f"{name!r} of the model is no parameter or buffer: return it from "
                    "get_extra_state, and take it back in set_extra_state"
                )
        for path, module in model.named_modules():
            kind, plain = type(module), Module
            if (kind.get_extra_state is plain.get_extra_state) != (
                kind.set_extra_state is plain.set_extra_state
            ):
                raise InvalidProgram(
                    f"the module {path or 'model'!r} has one of get_extra_state and "
                    "set_extra_state: a rank that joins needs both"
                )
    return torch.nn.ModuleList(models) if models != [given] else models[0]


def refuse_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        # What an observer of quantization-aware training begins with is empty, or infinite.
        is_unset = name.endswith(("min_val", "max_val")) and not tensor.isfinite().any()
        if is_unset or torch.nn.parameter.is_lazy(tensor):
            raise InvalidProgram(
                f"{name!r} has no shape or values yet: send one batch through the model before "
                "muster.torch.join()"
            )
        if tensor.device.type not in {"cpu", "cuda"}:
            raise InvalidProgram(
                f"{name!r} is on the device {tensor.device}, and muster.torch trains on CPUs and "
                "CUDA GPUs: move the model there before muster.torch.join()"
            )
        is_trained = isinstance(tensor, torch.nn.Parameter) and tensor.is_complex()
        if is_trained or f"{tensor.dtype}".removeprefix("torch.") not in _NAMES:
            raise InvalidProgram(
                f"{name!r} has the dtype {tensor.dtype}: use floats of 16 to 64 bits, integers or "
                "bools, in a buffer complex64 as well"
            )


def optimizers_of(given: OneOrMore[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that a script has; raises `InvalidProgram`."""
    optimizers = listed(given)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InvalidProgram(
                f"the optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer, or "
                "a list of them"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise InvalidProgram(
                "SparseAdam needs sparse gradients, and ranks add up dense ones: use Adam, and "
                "make the layer with sparse=False"
            )
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise InvalidProgram(
                f"{type(optimizer).__name__} computes the loss several times in a step, which "
                "ranks cannot share: use one that steps without a closure, such as AdamW"
            )
    return optimizers


def listed(given: OneOrMore[Any]) -> list[Any]:
    return [*given] if isinstance(given, list | tuple) else [given]


def refuse_own_state(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps something beside its options and the state of parameters."""
    parameters = {id(param) for param in parameters_of(optimizer)}
    own = [str(key) for key in optimizer.state if id(key) not in parameters]
    own += optimizer.state_dict().keys() - {"state", "param_groups"}
    if own:
        raise InvalidProgram(
            f"{type(optimizer).__name__} keeps {own[0]!r} beside the state of its parameters, and "
            "ranks that join would not have it: keep it in self.state[parameter] or in an option "
            "of param_groups"
        )


def refuse_other_parameters(model: Module, known: Mapping[str, torch.Tensor]) -> None:
    present = [name for name, _ in model.named_parameters()]
    if len(present) != len(known):
        new = sorted({*present} ^ {*known})
        raise InvalidProgram(
            f"the model has other parameters than at muster.torch.join(): {new[0]!r} was made or "
            "removed since. Make all of them first"
        )


def refuse_other_count(present: int, known: int) -> None:
    if present != known:
        raise InvalidProgram(
            "the optimizer has got other parameters since muster.torch.join(): give it all of them "
            "before, and freeze some with requires_grad_(False)"
        )


def refuse_new_buffers(model: Module, known: set[str]) -> set[str]:
    """Return the names of buffers that were made since; those that are saved are refused."""
    made = {name for name, _ in model.named_buffers()} - known
    if made and (saved := sorted(made & model.state_dict().keys())):
        raise InvalidProgram(
            f"the buffer {saved[0]!r} was made after muster.torch.join(), so other ranks and "
            "checkpoints do not have it: make it when the model is made"
        )
    return made


def refuse_new_array(name: str, array: NDArray[Any], place: NDArray[Any] | None) -> None:
    if place is None or (place.shape, place.dtype) != (array.shape, array.dtype):
        raise InvalidProgram(
            f"the array {name!r} of an object was not there when training began, or had another "
            "shape: let it make all of its arrays before the loop (an optimizer makes them in its "
            "first step), or do not register it"
        )


def refuse_lost(names: Iterable[str]) -> None:
    """Refuse objects that do not take back what they have given."""
    for name in sorted(names):
        raise InvalidProgram(
            f"{name!r} is not what it was after its own state was loaded, so a rank that joins "
            "would have another one: let load_state_dict take all that state_dict returns"
        )


def refuse_other_shape(name: str, present: torch.Tensor, known: torch.Tensor) -> None:
    if present.shape != known.shape:
        raise InvalidProgram(
            f"{name!r} had the shape {tuple(known.shape)} at muster.torch.join(), and now it has "
            f"{tuple(present.shape)}: give it its full size before"
        )


def refuse_evaluation(model: Module, modes: Mapping[Module, bool]) -> None:
    """Refuse a part of a model that a hook has left in evaluation mode; bodies begin as before."""
    changed = {part for part, is_training in modes.items() if is_training and not part.training}
    if not changed:
        return
    for whole in model.children() if isinstance(model, torch.nn.ModuleList) else [model]:
        for name, module in whole.named_modules() if whole.training else ():
            if module in changed:
                raise InvalidProgram(
                    f"a hook has put the module {name!r} in evaluation mode, and each body of the "
                    "loop begins as the first one did: call its eval() before the loop, or in the "
                    "body (by run.epoch)"
                )


def refuse_change(name: str, buffer: torch.Tensor, others: Mapping[str, torch.Tensor]) -> None:
    """Refuse the change of a buffer in the forward pass if it has no mean."""
    path, _, last = name.rpartition(".")
    is_derived = last == _QUANTIZER[0] and f"{path}.{_QUANTIZER[1]}".lstrip(".") in others
    if not (buffer.is_floating_point() or last == COUNTER or is_derived):
        raise InvalidProgram(
            f"the buffer {name!r} ({buffer.dtype}) changes in the forward pass, which runs once "
            "for each virtual shard, and changes are averaged: count in run.values, in a function "
            "given to run.after_step"
        )


class SentGradient(torch.Tensor):
    """Takes the place of a gradient that was contributed, and refuses whatever reads it."""

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "SentGradient":
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        sent: SentGradient = zero.expand(parameter.shape).as_subclass(cls)
        return sent

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> Any:  # noqa: ANN401
        raise InvalidProgram(
            ".grad is used after run.backward(loss), which has handed the gradients over: read, "
            "clip and change them in a function given to run.before_step, leave out GradScaler, "
            "and add losses up instead of calling backward() again"
        )


def refuse_scaled(loss: torch.Tensor) -> None:
    """Have the backward pass refuse a loss that a GradScaler has multiplied."""
    node = loss.grad_fn
    if node is None or node.name() != "MulBackward0":
        return

    def compare(inner: Any, outer: Any) -> None:  # noqa: ANN401
        if outer[0] is None or inner[0] is None or not outer[0].numel() == inner[0].numel() == 1:
            return
        share, exponent = math.frexp((inner[0] / outer[0]).item())
        if share == 0.5 and exponent > SCALES_FROM:  # noqa: PLR2004  a power of two
            raise InvalidProgram(
                f"the loss is multiplied by {2 ** (exponent - 1)}, as by a GradScaler, and the "
                "gradients are not divided by that: leave out GradScaler, and use autocast with "
                "bfloat16"
            )

    node.register_hook(compare)
