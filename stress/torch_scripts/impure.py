"""Scripts that compute from more than the state and the batch, each in another way."""

import copy
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from stress.torch_scripts.frame import (
    CLASSES,
    SAMPLES,
    Images,
    Loss,
    Script,
)
from stress.torch_scripts.pure import (
    Bags,
    Contrastive,
    Ema,
    Lora,
    Lstm,
    Mixup,
    Muon,
    NanoGpt,
    OneCycle,
    Padded,
    ResNet,
    Smoothed,
    Vae,
    Weighted,
    padded,
)
from tests.support.paced import PACE_FILE


class OwnGenerator(Vae):
    """The noise is of a generator that is not registered."""

    def begin(self) -> None:
        super().begin()
        self.noise = torch.Generator().manual_seed(7)


class Clock(Mixup):
    """What is new counts more with time."""

    def begin(self) -> None:
        super().begin()
        self.began = time.monotonic()

    def loss(self, x: Any, y: Any) -> Loss:
        return super().loss(x, y) * min(1.0, 0.5 + (time.monotonic() - self.began) / 60)


class RankInLoss(Contrastive):
    """Each rank draws its own noise, as under DDP."""

    def loss(self, x: Any, y: Any) -> Loss:
        torch.manual_seed(self.run.rank + 1000 * self.run.step)
        return super().loss(x, y)


class Counter(Vae):
    """The weight of the divergence grows with the batches that this process has seen."""

    batches = 0

    def loss(self, x: Any, y: Any) -> Loss:
        self.batches += 1
        return super().loss(x, y) * (1 + min(1.0, self.batches / 200))


class HiddenState(Lstm):
    """Each batch goes on from the hidden state of the one before."""

    state: Any = None

    def loss(self, x: Any, y: Any) -> Loss:
        if self.state is not None and self.state[0].shape[1] != len(x):
            self.state = None
        out, state = self.net(x, self.state)
        self.state = tuple(it.detach() for it in state)
        return cross_entropy(out.flatten(0, 1), y.flatten())


class SetOrder(Bags):
    """Losses are added up in the order of a set of names."""

    def loss(self, x: Any, y: Any) -> Loss:
        heads = {f"expert-{it}": it for it in range(3)}
        bag, wanted = self.net["bag"](x, y), x[y] % CLASSES
        total = torch.zeros(())
        for name in {*heads, "expert-0"}:
            total = total * 1.1 + cross_entropy(self.net["experts"][heads[name]](bag), wanted)
        return total


class TensorHook(NanoGpt):
    """Gradients of one layer are divided by their running norm."""

    norm = 1.0

    def begin(self) -> None:
        super().begin()
        self.net.places.weight.register_hook(self.scaled)

    def scaled(self, gradient: Tensor) -> Tensor:
        self.norm = 0.9 * self.norm + 0.1 * gradient.norm().item()
        return gradient / self.norm


class FreezingInBody(ResNet):
    """The first layer is frozen after the first epoch."""

    def loss(self, x: Any, y: Any) -> Loss:
        if self.run.epoch > 0:
            self.net[0].requires_grad_(False)  # noqa: FBT003
        return super().loss(x, y)


class CountedItems(Images):
    """Augments more, the oftener an item was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = [0] * SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        x, y = super().__getitem__(index)
        return x * (1 + 0.1 * self.reads[index]), y


class CountingData(ResNet):
    """In worker processes, whose copies of the data set count for themselves."""

    def data(self) -> Any:
        return CountedItems()


class CollateGenerator(Padded):
    """Sequences are cut by a generator that collate owns, in worker processes."""

    def options(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)

        def cut(items: list[Any]) -> Any:
            return padded([it[: max(2, len(it) - int(rng.integers(0, 3)))] for it in items])

        return {"collate_fn": cut}


class JitteredImages(Images):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)  # noqa: S311

    def __getitem__(self, index: int) -> Any:
        x, y = self.x[index], self.y[index]
        return x + self.rng.random() * 0.1, y


class OwnRandom(ResNet):
    """`random.Random` of the data set's own."""

    def data(self) -> Any:
        return JitteredImages()


class Attempt(Ema):
    """A rank that was started again learns more slowly."""

    found_by_resume = True

    def loss(self, x: Any, y: Any) -> Loss:
        loss = super().loss(x, y)
        assert isinstance(loss, Tensor)
        return loss / (1 + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


class OwnFile(Script):
    """The running mean of the loss is kept in a file."""

    def loss(self, x: Any, y: Any) -> Loss:
        file = Path(f"{os.environ.get(PACE_FILE, '-')}.{os.getpid()}")
        loss = cross_entropy(self.net(x), y)
        mean = float(file.read_text()) if file.exists() else 1.0
        file.write_text(str(0.9 * mean + 0.1 * loss.item()))
        return loss / mean


class Threads(Bags):
    """Parts of the loss are computed by threads, and added up as they come."""

    def begin(self) -> None:
        self.pool = ThreadPoolExecutor(3)

    def loss(self, x: Any, y: Any) -> Loss:
        bag, wanted = self.net["bag"](x, y), x[y] % CLASSES

        def part(expert: nn.Module) -> Tensor:
            time.sleep(0.001)
            return cross_entropy(expert(bag), wanted)

        parts = [self.pool.submit(part, it) for it in self.net["experts"]]
        total = torch.zeros(())
        for it in as_completed(parts):
            total = total * 1.1 + it.result()
        return total


class RateInBody(OneCycle):
    """Warms the rate up in the body."""

    def options(self) -> dict[str, Any]:
        return {}

    def loss(self, x: Any, y: Any) -> Loss:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (1 + self.run.step) / 20)
        return super().loss(x, y)


LOSSES: list[float] = []


class GlobalLosses(Smoothed):
    """Batches that are harder than usual count more."""

    def loss(self, x: Any, y: Any) -> Loss:
        loss = super().loss(x, y)
        assert isinstance(loss, Tensor)
        LOSSES.append(loss.item())
        return loss * (loss.item() / np.mean(LOSSES))


class RunningMaximum(Muon):
    """The loss is divided by the largest one so far."""

    most = 1e-9

    def loss(self, x: Any, y: Any) -> Loss:
        loss = super().loss(x, y)
        assert isinstance(loss, Tensor)
        self.most = max(self.most, loss.item())
        return loss / self.most


class Teacher(Ema):
    """The average is not registered."""

    found_by_resume = True

    def begin(self) -> None:
        self.average = copy.deepcopy(self.net).requires_grad_(False)  # noqa: FBT003

        @self.run.after_step
        def update() -> None:
            for mean, it in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(it.detach(), 0.1)


class Wearing(Weighted):
    """Items are normalised in the memory of the data set."""

    def data(self) -> Any:
        return [(x, y) for x, y in super().data()]

    def options(self) -> dict[str, Any]:
        def collate(items: list[Any]) -> Any:
            for x, _ in items:
                x.sub_(0.1 * x.mean())
            return default_collate(items)

        return {"collate_fn": collate}


class Urandom(Lora):
    """Dropout by the system's own random numbers, after the first epoch."""

    def loss(self, x: Any, y: Any) -> Loss:
        if self.run.epoch > 0:
            bits = torch.frombuffer(bytearray(os.urandom(x.numel())), dtype=torch.uint8)
            x = x * (bits.view(x.shape) > 25)
        return super().loss(x, y)


# What checks may miss, because few shards show it


class FlagInBody(ResNet):
    """The first layer is frozen once a shard was learnt well, and stays so."""

    is_frozen = False

    def loss(self, x: Any, y: Any) -> Loss:
        if self.is_frozen:
            self.net[0].requires_grad_(False)  # noqa: FBT003
        loss = super().loss(x, y)
        assert isinstance(loss, Tensor)
        self.is_frozen = self.is_frozen or loss.item() < 1.0
        return loss


class Median(GlobalLosses):
    """Batches that are harder than most count twice; few are, as losses fall."""

    def loss(self, x: Any, y: Any) -> Loss:
        loss = Smoothed.loss(self, x, y)
        assert isinstance(loss, Tensor)
        LOSSES.append(loss.item())
        return loss * (2.0 if loss.item() > np.median(LOSSES) else 1.0)
