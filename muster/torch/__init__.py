"""PyTorch: an ordinary training loop whose ranks may die, join and leave, with the same bits.

    import muster.torch

    run = muster.torch.join(model, optimizer, data=dataset)
    for batch in run.shards():
        loss = cross_entropy(model(batch["x"]), batch["y"])
        run.backward(loss)

state.py          model and optimizer in memory that peers and checkpoints can read
shards.py         which samples a virtual shard holds, and their numbers
computer.py       gradients of a shard, and the step of the optimizer
fingerprint.py    whether processes compute the same bits
run.py            `join`, and the loop
sampler.py        the same order, for scripts with a loop of their own
huggingface.py    a callback for the Trainer of Hugging Face, and its own loop
lightning.py      a callback for the Trainer of Lightning, and its own loop
saved.py          which of the checkpoints of these trainers are complete
process_group.py  ``init_process_group("muster")``, for all that uses torch.distributed
work.py           the tensors of its operations, and what these return
connect.py        how the ranks of such a group meet
store.py          ``init_method="muster://"``: they are those that `muster.mesh` has discovered
backend.py        our collectives over a group that torch already has
compression.py    a hook of DistributedDataParallel: gradients in fewer bytes
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

try:
    import torch  # first, for an error that says what to do

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
        raise ImportError(f"found {torch.__version__}")  # noqa: TRY301  one message for both
except ImportError as error:
    raise ImportError(
        f"muster.torch needs PyTorch 2.4 or newer ({error}): install it into the environment of "
        "this script (pip install torch)"
    ) from error

from muster.torch.run import Run, join
from muster.torch.sampler import sampler

if TYPE_CHECKING:
    from muster.torch.distributed.backend import TorchBackend as TorchBackend
    from muster.torch.distributed.compression import CompressionState as CompressionState
    from muster.torch.distributed.compression import compression_hook as compression_hook

__all__ = ["CompressionState", "Run", "TorchBackend", "compression_hook", "join", "sampler"]

_LAZY: Final = {
    "CompressionState": "compression",
    "TorchBackend": "backend",
    "compression_hook": "compression",
}
"""Few scripts need them."""


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module attribute can be anything
    if name not in _LAZY:
        raise AttributeError(f"module 'muster.torch' has no attribute {name!r}")
    return getattr(import_module(f"muster.torch.distributed.{_LAZY[name]}"), name)


def _create_group(options: Any, more: Any) -> Any:  # noqa: ANN401  torch's
    from muster.torch.distributed.process_group import MusterProcessGroup  # noqa: PLC0415  few scripts need it

    return MusterProcessGroup.create(options, more)


if torch.distributed.is_available():
    from muster.torch.distributed.store import meet

    torch.distributed.register_rendezvous_handler("muster", meet)
    torch.distributed.Backend.register_backend(
        "muster", _create_group, extended_api=True, devices=["cpu", "cuda"]
    )
