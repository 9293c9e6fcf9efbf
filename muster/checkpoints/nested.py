"""A state with PyTorch tensors, and with arrays below its top level, as names to arrays and values.

A nested array becomes one of the top level, named by its path ("optimizer.state.0.exp_avg"), and in
its place stands ``{"__array__": name}``. The value `ARRAYS` lists these arrays and those that are
tensors. So such a checkpoint can be listed, compared and exported without torch.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from muster.checkpoints.errors import CheckpointMismatch, UnsupportedState

ARRAY: Final = "__array__"
ARRAYS: Final = "muster.arrays"

VIEWED: Final = {"bfloat16": "int16", "complex64": "int64"}
"""Types of torch that a checkpoint has not, and those as which it keeps their bits."""

_PARAMETERS: Final = "params"
"""The key under which an optimizer of PyTorch lists the numbers of a group's parameters."""


def flatten(state: Any) -> Any:  # noqa: ANN401  what is not a mapping is refused when it is saved
    """Return the state that is saved; raises `UnsupportedState`. Copies no array."""
    if not isinstance(state, Mapping):
        return state
    if ARRAYS in state:
        raise UnsupportedState(f"the state has the key {ARRAYS!r}: use another name")
    flat, kinds = dict(state), dict[str, Any]()

    def named(value: Any, path: str) -> Any:  # noqa: ANN401
        if isinstance(value, dict) and ARRAY in value:
            raise UnsupportedState(f"{path} has the key {ARRAY!r}: use another name")
        if isinstance(value, float | str) or not (found := _array_of(value, path)):
            return value
        while path in flat or path == ARRAYS:
            path += "_"
        flat[path], kinds[path] = found
        return {ARRAY: path}

    for name, value in state.items():
        if found := _array_of(value, name):
            flat[name] = found[0]
            kinds |= {name: found[1]} if found[1] else {}
        else:
            with suppress(RecursionError):  # refused when it is saved
                flat[name] = with_leaves(value, f"{name}", named)
    return {**flat, ARRAYS: kinds} if kinds else flat


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the state that was flattened; raises `CheckpointMismatch` if it needs torch."""
    if ARRAYS not in flat:
        return flat
    arrays = {name: _restored(flat[name], kind) for name, kind in flat[ARRAYS].items()}
    nested: set[str] = set()

    def put_back(value: Any, _path: str) -> Any:  # noqa: ANN401
        if not isinstance(value, dict) or ARRAY not in value:
            return value
        nested.add(value[ARRAY])
        return arrays[value[ARRAY]]

    rest = {name: value for name, value in flat.items() if name not in arrays and name != ARRAYS}
    state = {name: with_leaves(value, name, put_back) for name, value in rest.items()}
    return state | {name: array for name, array in arrays.items() if name not in nested}


def load_into(objects: Mapping[str, Any], state: Mapping[str, Any], step: int) -> None:
    """Load each object's part of a state with its `load_state_dict`.

    Raises `CheckpointMismatch` if a part is missing, or has arrays of other names or shapes than
    the object's `state_dict`; then no object has changed.
    """
    for name, obj in objects.items():
        if not hasattr(obj, "load_state_dict"):
            raise UnsupportedState(
                f"{name!r} is a {type(obj).__name__}, which has no load_state_dict: take it from "
                "what restore() returns"
            )
        problem = f"it has only {', '.join(state) or 'no parts'}"
        if name in state and not (problem := _misfit(obj.state_dict(), state[name])):
            continue
        raise CheckpointMismatch(
            f"the checkpoint of step {step} does not fit {name!r}: {problem}. Bring the script "
            "back to what it was, or begin a job that does not resume"
        )
    for name, obj in objects.items():
        obj.load_state_dict(state[name])


def _misfit(own: Any, saved: Any) -> str:  # noqa: ANN401
    """Return how the arrays of two states differ, "" if they do not.

    Where `own` has no arrays yet, as an optimizer before its first step, `saved` may have any.
    """
    here, there = _shapes(own), _shapes(saved)
    filled = {path[:-1] for path in here}
    for path in {**here, **there}:
        is_new = path[:-1] not in filled and path[-1:] != (_PARAMETERS,)
        if here.get(path) != there.get(path) and not (path not in here and is_new):
            shapes = [
                f"of shape {side[path]}" if path in side else "missing" for side in (there, here)
            ]
            return f"{'.'.join(map(str, path))} is {shapes[0]} there and {shapes[1]} here"
    return ""


def _shapes(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], tuple[int, ...]]:  # noqa: ANN401
    """Return the shapes of the arrays in a state, by path."""
    if hasattr(value, "shape"):
        return {path: tuple(value.shape)}
    if path[-1:] == (_PARAMETERS,) and isinstance(value, list):
        return {path: (len(value),)}
    is_list = isinstance(value, list | tuple)
    items = enumerate(value) if is_list else value.items() if isinstance(value, Mapping) else ()
    return {at: shape for key, item in items for at, shape in _shapes(item, (*path, key)).items()}


def with_leaves(value: Any, path: str, leaf: Callable[[Any, str], Any]) -> Any:  # noqa: ANN401
    """Return `value` with what `leaf` makes of everything in its lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        items = [with_leaves(item, f"{path}.{at}", leaf) for at, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict) and not isinstance(value, Counter) and ARRAY not in value:
        return {key: with_leaves(item, f"{path}.{key}", leaf) for key, item in value.items()}
    return leaf(value, path)


def _array_of(value: Any, path: str) -> tuple[Any, dict[str, Any]] | None:  # noqa: ANN401
    """Return the array that holds `value` and how to restore it, or None if it is no array."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy and (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return value, {}
    # Another subclass, such as DTensor, would lose what makes it one.
    if not torch or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    kind: dict[str, Any] = {"torch": f"{value.dtype}".removeprefix("torch.")}
    kind |= {"requires_grad": True} if value.requires_grad else {}
    plain = value.detach()
    if (bits := VIEWED.get(kind["torch"])) is not None:
        plain = plain.resolve_conj().view(getattr(torch, bits))
    try:
        return plain.cpu().numpy(), kind
    except (TypeError, RuntimeError) as error:  # sparse, quantized, without data, float8, …
        where = f"the tensor {path} ({value.dtype}, {value.layout})"
        raise UnsupportedState(f"{where} cannot be saved: {error}") from error


def _restored(array: Any, kind: Mapping[str, Any]) -> Any:  # noqa: ANN401  an array or a tensor
    if not kind:
        return array
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        raise CheckpointMismatch(
            f"the checkpoint holds PyTorch tensors, and {sys.executable} has no torch: install it "
            "there, or run the script with the Python that saved the checkpoint"
        ) from error
    tensor = torch.from_numpy(array).view(getattr(torch, kind["torch"]))
    # A copy is aligned: kernels may add unaligned memory in another order, to other bits.
    return tensor.clone().requires_grad_("requires_grad" in kind)
