"""One rank of a side that `pytorch.py` compares.

    python bench/_torch_ranks.py managed|ddp|plain MODEL RESULT

The first rank writes the seconds of its median step into the file RESULT.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset, default_collate

import muster.torch

STEPS = {"mlp": 150, "mlp, large batch": 100, "gpt": 24, "cnn": 60}
WARM_UP_SECONDS = 5  # meanwhile a spare process of the managed side loads
SHARDS = 8
MICRO_BATCHES = {"mlp": 16, "mlp, large batch": 64, "gpt": 8, "cnn": 16}
CONTEXT = 64
TOKENS = 256


class Gpt(nn.Module):
    """A small transformer of 3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 256)
        self.places = nn.Parameter(torch.zeros(CONTEXT, 256))
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, TOKENS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens) + self.places
        return self.head(self.layers(embedded, mask=self.mask, is_causal=True))


def mlp() -> nn.Module:
    """Return 4.9 million parameters."""
    hidden = (nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 1600), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(1600, 10))


def cnn() -> nn.Module:
    """Return three convolutions with batch normalisation."""
    layers = [
        layer
        for one, other in pairwise((3, 32, 64, 128))
        for layer in (
            nn.Conv2d(one, other, 3, padding=1, bias=False),
            nn.BatchNorm2d(other),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def make(name: str) -> tuple[nn.Module, TensorDataset]:
    samples = STEPS[name] * SHARDS * MICRO_BATCHES[name]
    if name == "gpt":
        tokens = torch.randint(0, TOKENS, (samples, CONTEXT + 1))
        return Gpt(), TensorDataset(tokens[:, :-1], tokens[:, 1:])
    labels = torch.randint(0, 10, (samples,))
    if name == "cnn":
        return cnn(), TensorDataset(torch.randn(samples, 3, 32, 32), labels)
    return mlp(), TensorDataset(torch.randn(samples, 784), labels)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def managed(name: str) -> tuple[int, list[float]]:
    """Train with `muster.torch`; return the rank, and when its steps ended."""
    model, data = make(name)
    optimizer = torch.optim.AdamW(model.parameters())
    batch_size = MICRO_BATCHES[name] * SHARDS
    run = muster.torch.join(model, optimizer, data=data, batch_size=batch_size)
    times: list[float] = []
    run.after_step(lambda: times.append(time.perf_counter()))
    for x, y in run.shards():
        run.backward(loss_of(model, x, y))
    return run.rank, times


def unmanaged(name: str, rank: int, ranks: int) -> tuple[int, list[float]]:
    """Train a plain loop that accumulates, under DDP if there are several ranks."""
    model, data = make(name)
    optimizer = torch.optim.AdamW(model.parameters())
    net = model if ranks == 1 else DistributedDataParallel(model)
    times: list[float] = []
    for is_last, (x, y) in batches(data, MICRO_BATCHES[name], rank, ranks):
        with nullcontext() if is_last or ranks == 1 else net.no_sync():
            (loss_of(net, x, y) / (SHARDS // ranks)).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter())
    return rank, times


def batches(
    data: TensorDataset, size: int, rank: int, ranks: int
) -> Iterator[tuple[bool, list[Tensor]]]:
    """Yield a rank's micro-batches, and whether one is its last of a step."""
    for start in range(0, len(data), size * SHARDS):
        for shard in range(rank, SHARDS, ranks):
            first = start + shard * size
            batch = default_collate([data[number] for number in range(first, first + size)])
            yield shard + ranks >= SHARDS, batch


def main() -> None:
    side, name, result = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if side == "managed":
        rank, times = managed(name)
    elif side == "ddp":
        torch.distributed.init_process_group("gloo")
        rank, times = unmanaged(
            name, torch.distributed.get_rank(), torch.distributed.get_world_size()
        )
        torch.distributed.destroy_process_group()
    else:
        rank, times = unmanaged(name, 0, 1)
    if rank == 0:
        warm = [it for it in times if it > times[0] + WARM_UP_SECONDS]
        steps = [after - before for before, after in pairwise(warm)]
        Path(result).write_text(str(statistics.median(steps)))


if __name__ == "__main__":
    main()
