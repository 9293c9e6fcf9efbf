"""Tensors as arrays of the same bits, and what an optimizer keeps as tensors."""

import copy
from collections.abc import Iterator
from typing import Any, Final

import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from muster.checkpoints.nested import VIEWED
from muster.torch.refusals import parameters_of, refuse_own_state

_VIEWED: Final = {getattr(torch, kind): getattr(torch, bits) for kind, bits in VIEWED.items()}


def plain_option(option: Any) -> Any:  # noqa: ANN401
    """Return an option of an optimizer with numbers in place of tensors."""
    if isinstance(option, torch.Tensor):
        return option.tolist()
    return tuple(map(plain_option, option)) if isinstance(option, tuple) else option


def put_option(option: Any, given: Any) -> Any:  # noqa: ANN401
    """Return what `plain_option` was given; a tensor stays itself, others may refer to it."""
    if isinstance(option, torch.Tensor):
        return option.copy_(torch.tensor(given, dtype=option.dtype))
    if isinstance(option, tuple) and isinstance(given, tuple) and len(option) == len(given):
        return tuple(map(put_option, option, given))
    return given


def slots_of(
    names: Iterator[str], optimizer: Optimizer
) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    """Yield the tensors that an optimizer keeps, by parameter, the next of `names`, and key.

    A step of a copy makes them: what they look like is up to each optimizer. Those that the
    optimizer has not made itself are zeros.
    """
    originals = parameters_of(optimizer)
    clones = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in originals]
    memo = {id(original): clone for original, clone in zip(originals, clones, strict=True)}
    trial = copy.deepcopy(optimizer, memo)
    for clone in clones:
        clone.grad = torch.zeros_like(clone)
    trial.step()
    refuse_own_state(trial)
    for original, clone, name in zip(originals, clones, names, strict=False):
        for key, value in trial.state.get(clone, {}).items():
            if isinstance(value, torch.Tensor):
                own = optimizer.state.get(original, {})
                yield (name, key), own.get(key, torch.zeros_like(value))


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the numbers of a tensor, bit for bit; no copy of one on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().contiguous()
    array: NDArray[Any] = plain.view(_VIEWED.get(plain.dtype, plain.dtype)).numpy()
    return array


def tensor_of(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype)
