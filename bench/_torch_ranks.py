"""One rank of a side that `pytorch.py` compares.

    python bench/_torch_ranks.py managed|ddp|plain MODEL RESULT

The first rank writes the seconds of its median step into the file RESULT.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, TensorDataset, default_collate

import muster.torch

WARM_UP_SECONDS = {"managed": 5.0}  # meanwhile its spare process loads
SHORT_WARM_UP_SECONDS = 1.0  # of the other sides
MEASURED_SECONDS = 5.0
TRIAL_STEPS = 5
MOST_STEPS = 10_000  # far more than any side takes in this time
SHARDS = 8
DIFFERENT_STEPS = 16  # whose samples come again and again
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


class Repeated(Dataset[Any]):
    """A few samples as an epoch that does not end while it is measured."""

    def __init__(self, batch_size: int, *tensors: Tensor) -> None:
        self.data, self.length = TensorDataset(*tensors), MOST_STEPS * batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.data[index % len(self.data)]


def make(name: str) -> tuple[nn.Module, Repeated]:
    batch_size = SHARDS * MICRO_BATCHES[name]
    samples = DIFFERENT_STEPS * batch_size
    if name == "gpt":
        tokens = torch.randint(0, TOKENS, (samples, CONTEXT + 1))
        return Gpt(), Repeated(batch_size, tokens[:, :-1], tokens[:, 1:])
    labels = torch.randint(0, 10, (samples,))
    if name == "cnn":
        return cnn(), Repeated(batch_size, torch.randn(samples, 3, 32, 32), labels)
    return mlp(), Repeated(batch_size, torch.randn(samples, 784), labels)


class Clock:
    """Takes the time of each step, and knows when there are enough."""

    def __init__(self, side: str) -> None:
        self._warm_up_seconds = WARM_UP_SECONDS.get(side, SHORT_WARM_UP_SECONDS)
        self._seconds = self._warm_up_seconds + MEASURED_SECONDS
        self._times: list[float] = []

    def tick(self) -> bool:
        """Note the end of a step; return whether there are enough."""
        self._times.append(time.perf_counter())
        is_over = self._times[-1] > self._times[0] + self._seconds
        return is_over and len(self._times) > TRIAL_STEPS

    def steps_wanted(self) -> int:
        """Return how many steps there will be, judged by those so far."""
        passed = self._times[-1] - self._times[0]
        return int(self._seconds * (len(self._times) - 1) / passed) + 2

    def median_step(self) -> float:
        warm = [it for it in self._times if it > self._times[0] + self._warm_up_seconds]
        measured = max(warm, self._times[-2:], key=len)  # a slow machine takes few
        return statistics.median(after - before for before, after in pairwise(measured))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def managed(name: str, clock: Clock) -> int:
    """Train with `muster.torch`; return the rank."""
    model, data = make(name)
    optimizer = torch.optim.AdamW(model.parameters())
    batch_size = MICRO_BATCHES[name] * SHARDS
    run = muster.torch.join(model, optimizer, data=data, batch_size=batch_size)
    run.after_step(lambda: run.stop() if clock.tick() and run.rank == 0 else None)
    for x, y in run.shards():
        run.backward(loss_of(model, x, y))
    return run.rank


def unmanaged(name: str, clock: Clock, rank: int, ranks: int) -> None:
    """Train a plain loop that accumulates, under DDP if there are several ranks."""
    model, data = make(name)
    optimizer = torch.optim.AdamW(model.parameters())
    net = model if ranks == 1 else DistributedDataParallel(model)
    steps, wanted = 0, torch.tensor(MOST_STEPS)
    for is_last, (x, y) in batches(data, MICRO_BATCHES[name], rank, ranks):
        with nullcontext() if is_last or ranks == 1 else net.no_sync():
            (loss_of(net, x, y) / (SHARDS // ranks)).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
            steps += 1
            if steps == TRIAL_STEPS:
                wanted.fill_(clock.steps_wanted())
                if ranks > 1:  # they end after the same step
                    torch.distributed.broadcast(wanted, 0)
            if steps >= wanted.item():
                return


def batches(
    data: Repeated, size: int, rank: int, ranks: int
) -> Iterator[tuple[bool, list[Tensor]]]:
    """Yield a rank's micro-batches, and whether one is its last of a step."""
    for start in count(step=size * SHARDS):
        for shard in range(rank, SHARDS, ranks):
            first = start + shard * size
            batch = default_collate([data[number] for number in range(first, first + size)])
            yield shard + ranks >= SHARDS, batch


def main() -> None:
    side, name, result = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock, rank = Clock(side), 0
    if side == "managed":
        rank = managed(name, clock)
    elif side == "ddp":
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        unmanaged(name, clock, rank, torch.distributed.get_world_size())
    else:
        unmanaged(name, clock, 0, 1)
    if rank == 0:
        Path(result).write_text(str(clock.median_step()))


if __name__ == "__main__":
    main()
