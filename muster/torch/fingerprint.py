"""Whether processes compute the same bits with PyTorch: settings, and a few results.

Names of settings are not enough: variables of oneDNN and MKL change bits while torch reports the
same processor.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from muster.runtime.fingerprint import Fingerprint, fingerprint
from muster.torch.shards import Dataset, Sampler, set_generators
from muster.training.schedule import Schedule

ITEMS_COMPARED: Final = 8

_LENGTH: Final = 4099


def torch_fingerprint(device: torch.device, more: Mapping[str, str]) -> Fingerprint:
    """Return the fingerprint of this process, with numpy's and `more` facts that must be equal."""
    ours = fingerprint()
    facts = {
        "torch": str(torch.__version__),
        "torch's kernels": torch.backends.cpu.get_cpu_capability(),
        "the number of torch's threads": str(torch.get_num_threads()),
        "torch's deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
    if device.type == "cuda":
        facts |= {
            "the GPU": torch.cuda.get_device_name(device),
            "CUDA": f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
            "the precision of products": torch.get_float32_matmul_precision(),
        }
    digest = xxhash.xxh3_128(ours.digest.encode())
    values = torch.arange(_LENGTH, dtype=torch.float32).mul(0.618).frac().sub(0.5).to(device)
    square, image = values[:4096].view(64, 64), values[:3072].view(3, 1, 32, 32)
    for result in (
        square @ square.T,
        torch.nn.functional.conv2d(image, values[:144].view(16, 1, 3, 3)),
        torch.nn.functional.gelu(values),
        torch.softmax(square, 1),
        values.sum(),
        values * torch.finfo(torch.float32).tiny,  # flushed to zero by some settings
        *facts.values(),
    ):
        add_to_digest(digest, result)
    arithmetic = digest.hexdigest()
    add_to_digest(digest, more)
    return Fingerprint(
        digest=digest.hexdigest(), facts={**ours.facts, **facts, **more}, arithmetic=arithmetic
    )


def facts_of(
    model: torch.nn.Module, data: Dataset, schedule: Schedule, order: Sampler | None
) -> dict[str, str]:
    """Return what must be equal on all ranks: the model's shapes, and the data by eight items."""
    shapes, items = xxhash.xxh3_128(), xxhash.xxh3_128()
    for name, tensor in model.state_dict().items():
        is_tensor = isinstance(tensor, torch.Tensor)  # else it is extra state
        add_to_digest(shapes, [name, *((str(tensor.dtype), *tensor.shape) if is_tensor else ())])
    if order is not None:
        items.update(order.order(0).tobytes())
    for place in range(ITEMS_COMPARED):
        set_generators(schedule, 0, place)
        add_to_digest(items, data[place * len(data) // ITEMS_COMPARED])
    return {
        "the model": f"with tensors {shapes.hexdigest()[:8]}",
        "the data set": f"of {len(data)} samples, {items.hexdigest()[:8]}",
    }


def _bits_of(value: "torch.Tensor | NDArray[Any]") -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    bits: NDArray[Any] = value.detach().cpu().contiguous().view(torch.uint8).numpy()
    return bits


def add_to_digest(digest: xxhash.xxh3_128, value: Any) -> None:  # noqa: ANN401  an item of data
    """Add tensors, arrays, numbers, texts, and lists and mappings of these; nothing else."""
    if isinstance(value, torch.Tensor) and not value.dim():
        value = value.item()
    if isinstance(value, torch.Tensor | np.ndarray):
        with suppress(RuntimeError, TypeError, ValueError):  # a sparse tensor, an array of objects
            digest.update(np.ascontiguousarray(_bits_of(value)).view(np.uint8).data)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            add_to_digest(digest, [name, item])
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            add_to_digest(digest, item)
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(repr(value).encode())
