"""What the training scripts have in common: the loop, data, and some of the models."""

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import muster.torch
from tests.support.paced import PACE_FILE

FEATURES, CLASSES, CONTEXT, TOKENS = 12, 4, 10, 24
SAMPLES, BATCH_SIZE, EPOCHS = 372, 32, 4  # 48 steps; the last of an epoch has another shape
STEPS = EPOCHS * -(-SAMPLES // BATCH_SIZE)

Loss = Tensor | tuple[Tensor, float]


class Script:
    """What all have in common. By itself: a perceptron with what its begin, loss and data add."""

    lr = 0.05
    num_workers = 0
    run: Any
    net: Any
    optimizer: Any
    found_by_resume: ClassVar = False
    """Whether after the death of all ranks only what was computed before shows what is wrong."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=0.9, nesterov=True)

    def data(self) -> Any:
        x = torch.randn(SAMPLES, FEATURES)
        return TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES)).argmax(1))

    def options(self) -> dict[str, Any]:
        return {}

    def begin(self) -> None:
        """Register objects and hooks."""

    def loss(self, x: Any, y: Any) -> Loss:
        return cross_entropy(self.net(x), y)

    def train(self) -> None:
        torch.manual_seed(0)
        self.net = self.model()
        self.optimizer = self.make_optimizer()
        self.run = muster.torch.join(
            self.net,
            self.optimizer,
            data=self.data(),
            batch_size=BATCH_SIZE,
            epochs=EPOCHS,
            num_workers=self.num_workers,
            **self.options(),
        )
        self.begin()
        pace = Path(os.environ.get(PACE_FILE, "-"))
        for batch in self.run.shards():
            found = self.loss(*batch)
            loss, *weight = found if isinstance(found, tuple) else (found,)
            self.run.backward(loss, *weight)
            with suppress(FileNotFoundError):
                time.sleep(float(pace.read_text()))
        bits = b"".join(it.numpy().tobytes() for it in self.net.state_dict().values())
        print(f"sha256 {hashlib.sha256(bits).hexdigest()}", flush=True)


class Images(Dataset[Any]):
    """Pictures that are flipped and shifted at random by the global generators."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 1, 8, 8)
        self.y = (self.x[:, 0, :4].mean((1, 2)) > self.x[:, 0, 4:].mean((1, 2))).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = self.x[index].roll(int(np.random.randint(-1, 2)), -1)  # noqa: NPY002
        return (x.flip(-1) if torch.rand(()) < 0.5 else x), self.y[index]


def texts() -> Tensor:
    """Return sequences in which each token depends on the two before it."""
    text = torch.randint(0, TOKENS, (SAMPLES, CONTEXT + 1))
    for place in range(2, CONTEXT + 1):
        text[:, place] = (text[:, place - 1] + 3 * text[:, place - 2]) % TOKENS
    return text


class Tagger(nn.Module):
    """Embeddings and two recurrent layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, FEATURES, padding_idx=0)
        self.layers = nn.LSTM(FEATURES, 16, 2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(16, TOKENS)

    def forward(self, x: Any, state: Any = None) -> Any:
        hidden, state = self.layers(self.tokens(x), state)
        return self.head(hidden), state


class Gpt(nn.Module):
    """The embedding of tokens is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, 16), nn.Embedding(CONTEXT, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, x: Any) -> Any:
        embedded = self.tokens(x) + self.places.weight
        return self.head(self.layers(embedded, mask=self.mask, is_causal=True))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.other = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Any) -> Any:
        return functional.relu(x + self.norm2(self.other(functional.relu(self.norm1(self.one(x))))))


def scripts_of(module: ModuleType) -> list[type[Script]]:
    """Return the scripts that a module defines."""
    defined = (it for it in vars(module).values() if isinstance(it, type))
    return [it for it in defined if issubclass(it, Script) and it.__module__ == module.__name__]
