"""Model and optimizer as arrays in memory that peers and checkpoints can read.

The tensors of the user are moved there once and updated in place. Those on a GPU stay there, and
are copied when a peer or a checkpoint reads them. An optimizer makes its tensors in its first step;
a step of a copy shows their names and shapes before. What is no tensor, such as learning rates and
counters, is one JSON value.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import msgspec
import torch
from numpy.typing import NDArray
from torch.nn import Module
from torch.optim import Optimizer
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.errors import UnsupportedState
from muster.checkpoints.format import from_json, to_json
from muster.checkpoints.nested import ARRAYS, flatten, unflatten
from muster.program import InvalidProgram
from muster.torch.refusals import (
    EXTRA_STATE,
    OneOrMore,
    model_of,
    names_of,
    optimizers_of,
    parameters_of,
    refuse_lost,
    refuse_new_array,
    refuse_new_buffers,
    refuse_other_count,
    refuse_other_parameters,
    refuse_other_shape,
    refuse_tensors,
)
from muster.torch.shards import Generator
from muster.torch.tensors import array_of, plain_option, put_option, slots_of, tensor_of
from muster.training.groups.state_sync import InPlaceReplica

Arrays: TypeAlias = dict[str, NDArray[Any]]

MODEL: Final = "model"
"""The part of a state that the model has beside its tensors: what `get_extra_state` returns."""

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
    """The state of one rank. Its tensors are those of the user's models and optimizers."""

    initial: Arrays
    """A copy of what training begins with, once the memory is allocated."""
    replica: StagedReplica

    def __init__(self, model: OneOrMore[Module], optimizer: OneOrMore[Optimizer]) -> None:
        """Learn names and shapes; raises `InvalidProgram`."""
        self.model = model = model_of(model)
        self.optimizers: Final = optimizers_of(optimizer)
        self.registered: Final[dict[str, Any]] = {}
        """Objects with `state_dict` and `load_state_dict`."""
        self.generators: Final[dict[str, Generator]] = {}
        """Of the user; they are set for each shard, so they are no part of the state."""
        self.values: Final[dict[str, Any]] = {}  # of the user, in JSON
        self.losses: list[float] = []
        """The mean loss of each turn of the last step."""
        self.parameters: Final = dict(model.named_parameters())
        self.buffers: Final = dict(model.named_buffers())
        self._extra: Final = {
            f"{path}.{EXTRA_STATE}".removeprefix("."): module
            for path, module in model.named_modules()
            if type(module).get_extra_state is not torch.nn.Module.get_extra_state
        }
        """The modules with more state than tensors, by its name in `state_dict()`."""
        self._built: dict[str, bool] = {}
        """Whether each parameter required gradients when the loop began."""
        self._is_trained = self._built
        """The same, as the last hook has left it."""
        self._caches: set[str] = set()  # buffers that were made later and are not saved
        self._places: Final = {
            name: (model.get_submodule(path), key)
            for name in (*self.parameters, *self.buffers)
            for path, _, key in (name.rpartition("."),)
        }
        """The module of each tensor, and its name there."""
        refuse_tensors({**self.parameters, **self.buffers})
        for opt in self.optimizers:
            opt.register_step_pre_hook(self._refuse_step)
        self._is_stepping = False
        self._names: Final = names_of(self.parameters, self.optimizers)
        """Of the parameters of the optimizers, in their order."""
        names = iter(self._names)
        self._slots: Final = dict(slot for opt in self.optimizers for slot in slots_of(names, opt))
        self._views: dict[str, torch.Tensor] = {}
        """Where the tensors are: in the memory of the replica, or on a GPU."""
        self._kept: dict[str, torch.Tensor] = {}
        """Copies of these, to which `undo` goes back."""
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each tensor on a GPU, and its place in the memory of the replica."""
        self._layout = msgspec.Raw()
        self._initial_values = b""

    def allocate(self) -> bytes:
        """Move all into memory of its own; return what is no tensor. Raises `InvalidProgram`."""
        example = dict(self._tensors())
        for slot, tensor in self._slots.items():
            example[_slot_name(*slot)] = tensor
        arrays = {name: array_of(tensor) for name, tensor in example.items()}
        arrays |= self._flat_objects()[0]
        self._layout = msgspec.Raw(msgspec.json.encode(self._describe(example)))
        self.initial = {name: array.copy() for name, array in arrays.items()}
        self.replica = StagedReplica(arrays, self._fetch)
        for name, tensor in example.items():
            self._views[name] = view = tensor_of(self.replica.other[name], tensor.dtype)
            if self.is_staged(tensor):
                self._views[name] = tensor.detach().clone()
                self._staged.append((self._views[name], view))
        self.adopt_model()
        self._adopt_optimizer()
        self._built = self._is_trained = self._requirements()
        self._initial_values = self.encode()
        return self._initial_values

    def _requirements(self) -> dict[str, bool]:
        return {name: tensor.requires_grad for name, tensor in self.parameters.items()}

    def undo_freezing(self) -> None:
        """Undo what the body, which not every rank runs, has frozen or unfrozen."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad is not self._is_trained[name]:
                parameter.requires_grad_(self._is_trained[name])

    @property
    def device(self) -> torch.device:
        """The GPU of the model if it is on one, else the CPU."""
        devices = (tensor.device for tensor in self.parameters.values() if self.is_staged(tensor))
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

    def keep(self) -> None:
        """Keep a copy of all tensors, for `undo`."""
        self._kept = {name: view.clone() for name, view in self._views.items()}

    def undo(self, values: bytes) -> None:
        """Go back to what was kept, with the values of that time."""
        for name, view in self._views.items():
            view.copy_(self._kept[name])
        self._decode(values)

    @contextmanager
    def beginning(self, present: bytes) -> Iterator[None]:
        """Go back to what training began with, and then to what is there, whose values these are.

        Optimizers keep their tensors. Raises `InvalidProgram` if an object is another one then.
        """
        self._fetch()
        arrays = {name: array for name, array in self.replica.other.items() if not _is_slot(name)}
        kept, before = {name: array.copy() for name, array in arrays.items()}, self.digests()
        values, states = {**self.values}, [{**opt.state} for opt in self.optimizers]
        objects = {name: obj.state_dict() for name, obj in self.registered.items()}
        extra = {name: module.get_extra_state() for name, module in self._extra.items()}
        try:
            self._put_back(self.initial, self._initial_values, arrays)
            yield
        finally:
            self._put_back(kept, present, arrays)
            # A hook may hold on to what was there: that very object comes back, not only its bits.
            self.values.update(values)
            for opt, state in zip(self.optimizers, states, strict=True):
                opt.state.update(state)
            self._load(objects, extra)
        refuse_lost({name for name, digest in self.digests().items() if digest != before.get(name)})

    def _put_back(self, source: Arrays, values: bytes, arrays: Arrays) -> None:
        for name, array in arrays.items():
            array[...] = source[name]
        self.take_over(values)

    def register(self, name: str, obj: object) -> None:
        """Make an object part of the state; raises `InvalidProgram`."""
        if self._views:
            raise InvalidProgram(f"register {name!r} before the loop over run.shards()")
        if {**self.registered, **self.generators}.get(name, obj) is not obj:
            raise InvalidProgram(f"there is a registered {name!r} already: take another name")
        if isinstance(obj, Generator):
            self.generators[name] = obj
            return
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
        names = {id(tensor): name for name, tensor in {**self.parameters, **self.buffers}.items()}
        saved = self.model.state_dict(keep_vars=True).items()
        left = iter(self._names)
        groups = self._param_groups
        counts = [len(opt.param_groups) for opt in self.optimizers]
        complex64 = [name for name, value in example.items() if value.dtype is torch.complex64]
        return {
            "model": {key: names[id(value)] for key, value in saved if id(value) in names},
            "optimizer": [[next(left) for _ in group["params"]] for group in groups],
            "bfloat16": [name for name, value in example.items() if value.dtype is torch.bfloat16],
            **({"complex64": complex64} if complex64 else {}),
            **({"groups": counts} if len(counts) > 1 else {}),  # of each optimizer
        }

    def adopt_model(self) -> None:
        """Move into our memory what a hook has put into the place of a tensor of the model."""
        refuse_other_parameters(self.model, self.parameters)
        self._adopt(self.parameters)
        self.adopt_buffers()
        self._caches |= refuse_new_buffers(self.model, {*self.buffers, *self._caches})

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
            refuse_other_shape(name, present, view)
            view.copy_(present.detach())
            tensor.data = view
            setattr(module, key, tensor)

    def step_optimizer(self, turn: int | None = None) -> None:
        """Let the optimizer of a turn step, or all, and move what they make into our memory."""
        self._is_stepping = True
        try:
            for opt in self.optimizers if turn is None else [self.optimizers[turn]]:
                opt.step()
        finally:
            self._is_stepping = False
        self._adopt_optimizer()

    def _refuse_step(self, *_: object) -> None:
        if not self._is_stepping:
            raise InvalidProgram(
                "the optimizer steps once all ranks have added up their gradients: leave out "
                "optimizer.step(), optimizer.zero_grad() and GradScaler, run.backward(loss) is "
                "enough, and a larger batch_size takes the place of accumulating gradients"
            )

    def _adopt_optimizer(self) -> None:
        for name, parameter, states in self._optimized():
            for key, value in states.get(parameter, {}).items():
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
                    states[parameter][key] = view

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for opt in self.optimizers for group in opt.param_groups]

    def _optimized(self) -> Iterator[tuple[str, torch.Tensor, dict[torch.Tensor, Any]]]:
        """Yield each parameter that an optimizer has, and the states that this one keeps."""
        found = [(param, opt.state) for opt in self.optimizers for param in parameters_of(opt)]
        refuse_other_count(len(found), len(self._names))
        for name, (parameter, states) in zip(self._names, found, strict=True):
            yield name, parameter, states

    def options(self) -> list[tuple[str, Any]]:
        """Return what a scheduler changes: options such as learning rates, and how far it is."""
        steps = [(key, getattr(obj, "last_epoch", None)) for key, obj in self.registered.items()]
        return [*steps, *(item for group in self._groups() for item in group.items())]

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {key: plain_option(value) for key, value in group.items() if key != "params"}
            for group in self._param_groups
        ]

    def encode(self) -> bytes:
        """Return what is no tensor, as JSON; raises `InvalidProgram`."""
        kept: dict[str, dict[str, Any]] = {}
        for name, parameter, states in self._optimized():
            if found := states.get(parameter):
                kept[name] = {
                    key: None if isinstance(value, torch.Tensor) else value
                    for key, value in found.items()
                }
        arrays, objects = self._flat_objects()
        for name, array in arrays.items():
            refuse_new_array(name, array, self.replica.other.get(name))
            self.replica.other[name][...] = array
        self.replica.is_behind = bool(self._staged)
        self._is_trained = self._requirements()
        changed = {name: new for name, new in self._is_trained.items() if new != self._built[name]}
        try:
            value = {
                "groups": to_json(self._groups(), "optimizer.param_groups"),
                "kept": to_json(kept, "optimizer.state"),
                "objects": objects,
                "values": to_json(self.values, "run.values"),
                "loss": to_json(self.losses[-1] if self.losses else None, "the loss"),
                "layout": self._layout,
                # Only what a hook has changed: other states keep their bytes.
                **({"requires_grad": changed} if changed else {}),
                **({"losses": to_json(self.losses, "losses")} if self.losses[1:] else {}),
            }
            # Not sorted: a program may see the order of its dictionaries.
            return msgspec.json.encode(value)
        except (ValueError, UnsupportedState) as error:  # an integer of more than 64 bits
            raise InvalidProgram(f"the state cannot be saved or sent: {error}") from error

    def _flat_objects(self) -> tuple[Arrays, dict[str, Any]]:
        """Return the arrays of objects, and the rest of their state as JSON."""
        states = {REGISTERED: {name: obj.state_dict() for name, obj in self.registered.items()}}
        if self._extra:
            states[MODEL] = {name: module.get_extra_state() for name, module in self._extra.items()}
        try:
            flat = flatten(states)
            arrays = {name: flat.pop(name) for name in flat.get(ARRAYS, {})}
            return arrays, {name: to_json(value, name) for name, value in flat.items()}
        except UnsupportedState as error:
            raise InvalidProgram(f"the state cannot be saved or sent: {error}") from error

    def digests(self) -> dict[str, str]:
        """Return a digest of each thing that the body of the loop must leave as it is, by name."""
        arrays, objects = self._flat_objects()
        arrays |= {name: array_of(tensor) for name, tensor in self.parameters.items()}
        plain = {f"{REGISTERED}.{name}": part for name, part in objects[REGISTERED].items()}
        plain["run.values"] = to_json(self.values, "run.values")
        found = {name: xxh3_64_hexdigest(msgspec.json.encode(part)) for name, part in plain.items()}
        return found | {name: xxh3_64_hexdigest(array.data) for name, array in arrays.items()}

    def extra_state(self) -> bytes:
        """Return bytes that differ if what a `get_extra_state` returns does."""
        if not self._extra:
            return b""
        arrays, objects = self._flat_objects()
        bits = [array.tobytes() for name, array in arrays.items() if name.startswith(f"{MODEL}.")]
        return msgspec.json.encode(objects.get(MODEL)) + b"".join(bits)

    def _decode(self, content: bytes) -> None:
        value = msgspec.json.decode(content)
        groups, kept = from_json(value["groups"]), from_json(value["kept"])
        for group, given in zip(self._param_groups, groups, strict=True):
            group.update({key: put_option(group.get(key), option) for key, option in given.items()})
        self._is_trained = {**self._built, **value.get("requires_grad", {})}
        self.undo_freezing()
        for name, parameter, kept_here in self._optimized():
            found = kept.get(name)
            kept_here.pop(parameter, None)
            if found is not None:
                kept_here[parameter] = {
                    key: self._views.get(_slot_name(name, key)) if slot is None else slot
                    for key, slot in found.items()
                }
        flat = {name: from_json(part) for name, part in value["objects"].items()}
        for name in flat.get(ARRAYS, {}):
            flat[name] = self.replica.other[name].copy()
        saved = unflatten(flat)
        states, extra = saved[REGISTERED], saved.get(MODEL, {})
        there, here = sorted([*states, *extra]), sorted([*self.registered, *self._extra])
        if there != here:
            raise InvalidProgram(
                f"the saved state has the registered objects {there}, and this script {here}: "
                "register the same, or begin a job that does not resume"
            )
        self._load(states, extra)
        self.values.clear()
        self.values.update(from_json(value["values"]))
        loss = from_json(value["loss"])
        self.losses = from_json(value.get("losses", [] if loss is None else [loss]))

    def _load(self, objects: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        for name, state in objects.items():
            self.registered[name].load_state_dict(state)
        for name, state in extra.items():
            self._extra[name].set_extra_state(state)


def _model_name(tensor: str) -> str:
    return f"model.{tensor}"


def _slot_name(parameter: str, key: str) -> str:
    return f"optimizer.{parameter}.{key}"


def _is_slot(name: str) -> bool:
    return name.startswith("optimizer.")
