"""Model and optimizer as arrays in memory that peers and checkpoints can read.

The tensors of the user are moved there once and updated in place. Those on a GPU stay there, and
are copied when a peer or a checkpoint reads them. An optimizer makes its tensors in its first step;
a step of a copy shows their names and shapes before. What is no tensor, such as learning rates and
counters, is one JSON value.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from muster.checkpoints.errors import UnsupportedState
from muster.checkpoints.format import DTYPES, from_json, to_json
from muster.checkpoints.nested import ARRAYS, flatten, unflatten
from muster.program import InvalidProgram
from muster.training.state_sync import InPlaceReplica

Arrays: TypeAlias = dict[str, NDArray[Any]]

_NAMES: Final = frozenset(np.dtype(kind).name for kind in DTYPES)
"""Of the kinds of numbers that a checkpoint can hold."""

_VIEWED: Final = {torch.bfloat16: torch.int16}
"""Kinds of numbers that numpy lacks, and those as which it holds their bits."""


REGISTERED: Final = "registered"
"""The part of a state that holds registered objects, beside the model and the optimizer."""


class StagedReplica(InPlaceReplica):
    """A replica of tensors on GPUs. Every reader begins with the digest, which fetches them."""

    def __init__(self, example: Arrays, fetch: Callable[[], None]) -> None:
        super().__init__(example)
        self._fetch: Final = fetch
        self.is_behind = False
        """Whether the GPUs have taken a step since."""

    def digest(self) -> str:
        if self.is_behind:
            self._fetch()
            self.is_behind = False
        return super().digest()


class TrainingState:
    """The state of one rank. Its tensors are those of the user's model and optimizer."""

    initial: Arrays
    """A copy of what training begins with, once the memory is allocated."""
    replica: StagedReplica

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Learn names and shapes; raises `InvalidProgram`."""
        self.model: Final = model
        self.optimizer: Final = optimizer
        self.registered: Final[dict[str, Any]] = {}
        """Objects with `state_dict` and `load_state_dict`."""
        self.values: Final[dict[str, Any]] = {}  # of the user, in JSON
        self.loss: float | None = None
        """The mean loss of the last step."""
        _refuse_other_types(model, optimizer)
        self.parameters: Final = dict(model.named_parameters())
        self.buffers: Final = dict(model.named_buffers())
        self._places: Final = {
            name: (model.get_submodule(path), key)
            for name in (*self.parameters, *self.buffers)
            for path, _, key in (name.rpartition("."),)
        }
        """The module of each tensor, and its name there."""
        _refuse_tensors({**self.parameters, **self.buffers})
        _refuse_closures(optimizer)
        optimizer.register_step_pre_hook(self._refuse_step)
        self._is_stepping = False
        self._names: Final = _names_of(self.parameters, optimizer)
        """Of the parameters of the optimizer, in its order."""
        self._slots: Final = _optimizer_slots(self._names, optimizer)
        self._views: dict[str, torch.Tensor] = {}
        """Where the tensors are: in the memory of the replica, or on a GPU."""
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each tensor on a GPU, and its place in the memory of the replica."""
        self._layout = msgspec.Raw()

    def allocate(self) -> None:
        """Move everything into memory of its own; raises `InvalidProgram`."""
        example = dict(self._tensors())
        for slot, tensor in self._slots.items():
            example[_slot_name(*slot)] = tensor
        arrays = {name: _array_of(tensor) for name, tensor in example.items()}
        arrays |= self._flat_objects()[0]
        self._layout = msgspec.Raw(msgspec.json.encode(self._describe(example)))
        self.initial = {name: array.copy() for name, array in arrays.items()}
        self.replica = StagedReplica(arrays, self._fetch)
        for name, tensor in example.items():
            self._views[name] = view = _tensor_of(self.replica.other[name], tensor.dtype)
            if self.is_staged(tensor):
                self._views[name] = tensor.detach().clone()
                self._staged.append((self._views[name], view))
        self.adopt_model()
        self._adopt_optimizer()

    @property
    def device(self) -> torch.device:
        """The GPU of the model if it is on one, else the CPU."""
        devices = (it.device for it in self.parameters.values() if self.is_staged(it))
        return next(devices, torch.device("cpu"))

    def is_staged(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is where no peer can read it."""
        return bool(tensor.device.type != "cpu")

    def _fetch(self) -> None:
        for tensor, view in self._staged:
            view.copy_(tensor)

    def take_over(self, values: bytes) -> None:
        """Go on from what a peer or a checkpoint has put into the replica."""
        for tensor, view in self._staged:
            tensor.copy_(view)
        if values:
            self._decode(values)

    def register(self, name: str, obj: object) -> None:
        """Make an object part of the state; raises `InvalidProgram`."""
        if self._views:
            raise InvalidProgram(f"register {name!r} before the loop over run.shards()")
        if self.registered.get(name, obj) is not obj:
            raise InvalidProgram(f"there is a registered {name!r} already: take another name")
        if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise InvalidProgram(
                f"the registered {name!r} is a {type(obj).__name__}, which has no state_dict and "
                "load_state_dict: keep JSON values in run.values instead"
            )
        self.registered[name] = obj

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for tensors in (self.parameters, self.buffers):
            for name, tensor in tensors.items():
                yield _model_name(name), tensor

    def _describe(self, example: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return what an export needs to build the `state_dict()` of model and optimizer.

        Tied parameters have several names there, and some buffers none.
        """
        names = {id(it): name for name, it in {**self.parameters, **self.buffers}.items()}
        saved = self.model.state_dict(keep_vars=True).items()
        left = iter(self._names)
        groups = self.optimizer.param_groups
        return {
            "model": {key: names[id(value)] for key, value in saved if id(value) in names},
            "optimizer": [[next(left) for _ in group["params"]] for group in groups],
            "bfloat16": [name for name, it in example.items() if it.dtype is torch.bfloat16],
        }

    def adopt_model(self) -> None:
        """Move into our memory what a hook has put into the place of a tensor of the model."""
        present = [name for name, _ in self.model.named_parameters()]
        if len(present) != len(self.parameters):
            new = sorted({*present} ^ {*self.parameters})
            raise InvalidProgram(
                f"the model has other parameters than at muster.torch.join(): {new[0]!r} was made "
                "or removed since. Make all of them first"
            )
        self._adopt(self.parameters)
        self.adopt_buffers()

    def adopt_buffers(self) -> None:
        """Move into our memory what a forward pass has put into the place of a buffer."""
        self._adopt(self.buffers)

    def _adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            module, key = self._places[name]
            present = getattr(module, key)
            view = self._views[_model_name(name)]
            if present.data_ptr() == view.data_ptr():
                continue
            view.copy_(present.detach())
            tensor.data = view
            setattr(module, key, tensor)

    def step_optimizer(self) -> None:
        """Let the optimizer step, and move what it has made into our memory."""
        self._is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self._is_stepping = False
        self._adopt_optimizer()

    def _refuse_step(self, *_: object) -> None:
        if not self._is_stepping:
            raise InvalidProgram(
                "the optimizer steps once all ranks have added up their gradients: leave out "
                "optimizer.step(), optimizer.zero_grad() and GradScaler, run.backward(loss) is "
                "enough"
            )

    def _adopt_optimizer(self) -> None:
        for name, parameter in self._optimized():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    continue
                view = self._views.get(_slot_name(name, key))
                if view is None:
                    raise InvalidProgram(
                        f"the optimizer keeps a tensor {key!r} of {name!r} that its first step did "
                        "not make: use an optimizer of torch.optim"
                    )
                if view.data_ptr() != value.data_ptr():
                    view.copy_(value)
                    self.optimizer.state[parameter][key] = view

    def _optimized(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = [it for group in self.optimizer.param_groups for it in group["params"]]
        if len(parameters) != len(self._names):
            raise InvalidProgram(
                "the optimizer has got other parameters since muster.torch.join(): give it all of "
                "them before, and freeze some with lr=0"
            )
        yield from zip(self._names, parameters, strict=True)

    def options(self) -> list[tuple[str, Any]]:
        """Return the options of the optimizer, such as learning rates, but not tensors."""
        return [
            (key, value)
            for group in self.optimizer.param_groups
            for key, value in group.items()
            if key != "params" and not isinstance(value, torch.Tensor)
        ]

    def encode(self) -> bytes:
        """Return what is no tensor, as JSON; raises `InvalidProgram`."""
        kept: dict[str, dict[str, Any]] = {}
        for name, parameter in self._optimized():
            if found := self.optimizer.state.get(parameter):
                kept[name] = {
                    key: None if isinstance(value, torch.Tensor) else value
                    for key, value in found.items()
                }
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        arrays, objects = self._flat_objects()
        for name, array in arrays.items():
            place = self.replica.other.get(name)
            if place is None or (place.shape, place.dtype) != (array.shape, array.dtype):
                raise InvalidProgram(
                    f"the array {name!r} of a registered object was not there when training began, "
                    "or had another shape: let it make all of its arrays before the loop (an "
                    "optimizer makes them in its first step), or do not register it"
                )
            place[...] = array
        self.replica.is_behind = bool(self._staged)
        try:
            value = {
                "groups": to_json(groups, "optimizer.param_groups"),
                "kept": to_json(kept, "optimizer.state"),
                "objects": objects,
                "values": to_json(self.values, "run.values"),
                "loss": to_json(self.loss, "the loss"),
                "layout": self._layout,
            }
            # Not sorted: a program may see the order of its dictionaries.
            return msgspec.json.encode(value)
        except (ValueError, UnsupportedState) as error:  # an integer of more than 64 bits
            raise InvalidProgram(f"the state cannot be saved or sent: {error}") from error

    def _flat_objects(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the arrays of the registered objects, and the rest of their state as JSON."""
        states = {name: it.state_dict() for name, it in self.registered.items()}
        try:
            flat = flatten({REGISTERED: states})
            arrays = {name: flat.pop(name) for name in flat.get(ARRAYS, {})}
            return arrays, {name: to_json(it, name) for name, it in flat.items()}
        except UnsupportedState as error:
            raise InvalidProgram(f"the state cannot be saved or sent: {error}") from error

    def _decode(self, content: bytes) -> None:
        value = msgspec.json.decode(content)
        groups, kept = from_json(value["groups"]), from_json(value["kept"])
        for group, given in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(given)
        for name, parameter in self._optimized():
            found = kept.get(name)
            self.optimizer.state.pop(parameter, None)
            if found is not None:
                self.optimizer.state[parameter] = {
                    key: self._views.get(_slot_name(name, key)) if one is None else one
                    for key, one in found.items()
                }
        flat = {name: from_json(it) for name, it in value["objects"].items()}
        for name in flat.get(ARRAYS, {}):
            flat[name] = self.replica.other[name].copy()
        states = unflatten(flat)[REGISTERED]
        if states.keys() != self.registered.keys():
            raise InvalidProgram(
                f"the saved state has the registered objects {sorted(states)}, and this script "
                f"{sorted(self.registered)}: register the same, or begin a job that does not resume"
            )
        for name, state in states.items():
            self.registered[name].load_state_dict(state)
        self.values.clear()
        self.values.update(from_json(value["values"]))
        self.loss = from_json(value["loss"])


def _model_name(tensor: str) -> str:
    return f"model.{tensor}"


def _slot_name(parameter: str, key: str) -> str:
    return f"optimizer.{parameter}.{key}"


def _names_of(
    parameters: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> list[str]:
    names = {id(parameter): name for name, parameter in parameters.items()}
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise InvalidProgram(
                    "the optimizer has a parameter that the model does not have: make the "
                    "optimizer of model.parameters()"
                )
            found.append(names[id(parameter)])
    left = [n for n, it in parameters.items() if it.requires_grad and n not in found]
    if left:
        raise InvalidProgram(
            f"the optimizer does not have the parameter {left[0]!r}: give it to the optimizer (one "
            "optimizer, with groups of parameters), or freeze it with requires_grad_(False)"
        )
    return found


def _refuse_other_types(model: object, optimizer: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidProgram(f"the model is a {type(model).__name__}: give a torch.nn.Module")
    parallel = torch.nn.parallel
    if isinstance(model, parallel.DistributedDataParallel | parallel.DataParallel):
        raise InvalidProgram(
            f"the model is in a {type(model).__name__}, which would add up gradients, too: give "
            "the model itself, and leave out init_process_group()"
        )
    for name, value in model.state_dict().items():
        if name.rpartition(".")[2] == "_extra_state" or not isinstance(value, torch.Tensor):
            words = "leave get_extra_state out, and give an object with state_dict to run.register"
            raise InvalidProgram(f"{name!r} of the model is no parameter or buffer: {words}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidProgram(
            f"the optimizer is a {type(optimizer).__name__}: give one torch.optim.Optimizer, which "
            "may have several groups of parameters"
        )


def _refuse_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
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
        if f"{tensor.dtype}".removeprefix("torch.") not in _NAMES and tensor.dtype not in _VIEWED:
            raise InvalidProgram(
                f"{name!r} has the dtype {tensor.dtype}, which a checkpoint cannot hold: use "
                "floats of 16 to 64 bits, integers or bools"
            )


def _refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InvalidProgram(
            f"{type(optimizer).__name__} computes the loss several times in a step, which cannot "
            "be shared among ranks: use an optimizer that steps without a closure, such as AdamW"
        )


def _optimizer_slots(
    names: list[str], optimizer: torch.optim.Optimizer
) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors that the optimizer keeps, by parameter and key.

    A step of a copy makes them: what they look like is up to each optimizer. Those that the
    optimizer has not made itself are zeros.
    """
    originals = [it for group in optimizer.param_groups for it in group["params"]]
    clones = [it.detach().clone().requires_grad_(it.requires_grad) for it in originals]
    memo = {id(one): other for one, other in zip(originals, clones, strict=True)}
    trial = copy.deepcopy(optimizer, memo)
    for clone in clones:
        clone.grad = torch.zeros_like(clone)
    trial.step()
    return {
        (name, key): optimizer.state.get(original, {}).get(key, torch.zeros_like(value))
        for name, original, clone in zip(names, originals, clones, strict=True)
        for key, value in trial.state.get(clone, {}).items()
        if isinstance(value, torch.Tensor)
    }


def _array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the numbers of a tensor, bit for bit; no copy of one on the CPU."""
    plain = tensor.detach().cpu().contiguous()
    array: NDArray[Any] = plain.view(_VIEWED.get(plain.dtype, plain.dtype)).numpy()
    return array


def _tensor_of(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype)
