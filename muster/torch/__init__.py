"""PyTorch: an ordinary training loop whose ranks may die, join and leave, with the same bits.

    import muster.torch

    run = muster.torch.join(model, optimizer, data=dataset)
    for batch in run.shards():
        loss = cross_entropy(model(batch["x"]), batch["y"])
        run.backward(loss)

state.py        model and optimizer in memory that peers and checkpoints can read
shards.py       which samples a virtual shard holds, and their numbers
computer.py     gradients of a shard, and the step of the optimizer
fingerprint.py  whether processes compute the same bits
run.py          `join`, and the loop
sampler.py      the same order, for scripts with a loop of their own
huggingface.py  a callback for the Trainer of Hugging Face, and its own loop
lightning.py    a callback for the Trainer of Lightning, and its own loop
saved.py        which of the checkpoints of these trainers are complete
"""

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

__all__ = ["Run", "join", "sampler"]
