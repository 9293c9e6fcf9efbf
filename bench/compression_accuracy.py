"""What compressed sums of managed jobs cost in accuracy: ``python bench/compression_accuracy.py``.

A step is that of a managed job, in one process: each of 16 virtual shards computes its gradient,
the product's adder sums them up in 8 groups, compressed or whole, and the optimizer gets the mean.
The bits are those of any number of ranks and hosts. Digits: held-out points that an MLP and a small
CNN get right, in percent, with SGD and momentum. GPT: held-out nats of a character, on the pages of
``docs``, with Adam. All kinds have the rate of plain. Only random has a tenth, and four times the
steps, as plain beside it. With names such as ``mlp`` only these are run.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from muster.collectives.reduction.compressed import KINDS
from muster.collectives.reduction.summation import Adder, tree_adder
from muster.collectives.reduction.tree import Block

LEAVES, GROUPS, SEEDS = 16, 8, 3
TRAINED: Final = 1400
CONTEXT, WIDTH = 64, 64
RATIO: Final = 0.1

Draw = Callable[[], tuple[Tensor, ...]]
"""Returns the inputs and targets of a step."""


class Task(NamedTuple):
    model: Callable[[], nn.Module]
    draw: Callable[[int], Draw]
    """By seed."""
    score: Callable[[nn.Module, int], float]
    optimizer: Callable[..., torch.optim.Optimizer]
    rate: float
    steps: int
    goal: float
    """The most that a kind may be worse than plain, in the unit of the score."""
    compared: Sequence[tuple[str, ...]]
    """Each begins with what the others are compared to."""


def train(task: Task, name: str, seed: int) -> float:
    torch.manual_seed(seed)
    model, draw = task.model(), task.draw(seed)
    parameters = dict(model.named_parameters())
    sizes = [parameter.numel() for parameter in parameters.values()]

    def loss(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = functional_call(model, weights, (inputs,))
        return cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="sum")

    gradients_of = vmap(grad(loss), (None, 0, 0))
    rate, steps = (task.rate / 10, 4 * task.steps) if name in SLOW else (task.rate, task.steps)
    optimizer = task.optimizer(parameters.values(), lr=rate)
    for add in adders(name, sum(sizes), seed, steps):
        inputs, targets = (part.unflatten(0, (LEAVES, -1)) for part in draw())
        gradients = gradients_of(parameters, inputs, targets).values()
        vectors = torch.cat([part.flatten(1) for part in gradients], 1).detach().numpy()
        add([*vectors], total := np.empty(sum(sizes), np.float32), 0)
        mean = torch.from_numpy(total / np.float32(targets.numel()))
        for parameter, part in zip(parameters.values(), mean.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    with torch.no_grad():
        return task.score(model, seed)


def adders(name: str, elements: int, seed: int, steps: int) -> Iterator[Adder]:
    """Yield, for each step, what sums up the leaves."""
    leaves = [Block(0, leaf) for leaf in range(LEAVES)]
    if name not in KINDS:
        yield from [tree_adder(leaves)] * steps
        return
    compression = KINDS[name](LEAVES, GROUPS, elements, seed, RATIO)
    add = compression.adder_of(leaves)
    for step in range(steps):
        compression.begin(step)
        yield add


def digits(seed: int) -> tuple[Tensor, Tensor]:
    """Return images and labels in the order of a seed; the last ones are held out."""
    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.target))
    images = torch.tensor(found.data[order] / 16, dtype=torch.float32)
    return images, torch.tensor(found.target[order])


def draw_digits(seed: int) -> Draw:
    both, chance = digits(seed), np.random.default_rng((seed, 1))

    def draw() -> tuple[Tensor, ...]:
        chosen = torch.from_numpy(chance.integers(0, TRAINED, 64))
        return tuple(part[chosen] for part in both)

    return draw


def points(model: nn.Module, seed: int) -> float:
    images, labels = digits(seed)
    right = model(images[TRAINED:]).argmax(1) == labels[TRAINED:]
    return 100 * right.float().mean().item()


def mlp() -> nn.Module:
    hidden = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(128, 10))


def cnn() -> nn.Module:
    first = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()
    second = nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*first, *second, nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


DOCS: Final = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
TEXT: Final = "".join(page.read_text() for page in DOCS).encode("ascii", "replace")
HELD_OUT: Final = len(TEXT) // 10
FUTURE: Final = torch.full((CONTEXT, CONTEXT), -torch.inf).triu(1)
"""What a character may not look at."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        wide = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(wide[0], nn.GELU(), wide[1])

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norm1(x)).unflatten(2, (12, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)  # torch's own attention is slow under vmap
        mixed = (query @ key.transpose(2, 3) / 4 + FUTURE).softmax(3) @ value
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):  # 121,000 parameters
    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(128, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.rest = nn.Sequential(Layer(), Layer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128))

    def forward(self, characters: Tensor) -> Tensor:
        return self.rest(self.characters(characters) + self.places(torch.arange(CONTEXT)))


def lines(starts: np.ndarray) -> tuple[Tensor, Tensor]:
    places = starts[:, None] + np.arange(CONTEXT + 1)
    found = torch.from_numpy(np.frombuffer(TEXT, np.uint8)[places].astype(np.int64))
    return found[:, :-1], found[:, 1:]


def draw_lines(seed: int) -> Draw:
    chance = np.random.default_rng((seed, 2))
    return lambda: lines(chance.integers(0, len(TEXT) - HELD_OUT - CONTEXT, LEAVES))


def nats(model: nn.Module, _seed: int) -> float:
    inputs, targets = lines(np.arange(len(TEXT) - HELD_OUT, len(TEXT) - CONTEXT, CONTEXT))
    return -cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()


SGD: Final = partial(torch.optim.SGD, momentum=0.9)
FAST: Final = ("plain", "int8", "fp16", "bf16")
SLOW: Final = ("plain at 1/10", "random")
TASKS: Final = {
    "mlp": Task(mlp, draw_digits, points, SGD, 0.05, 400, 0.5, (FAST, SLOW)),
    "cnn": Task(cnn, draw_digits, points, SGD, 0.05, 250, 0.5, (FAST, SLOW)),
    "gpt": Task(Gpt, draw_lines, nats, torch.optim.Adam, 3e-3, 300, 0.01, (FAST,)),
}


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    for title in chosen or TASKS:
        task = TASKS[title]
        for names in task.compared:
            plain = 0.0
            for name in names:
                scores = [train(task, name, seed) for seed in range(SEEDS)]
                mean, each = statistics.mean(scores), ", ".join(f"{it:.3f}" for it in scores)
                plain = plain or mean
                loss = f"worse by {plain - mean:.3f}" + " !" * (plain - mean > task.goal)
                print(f"{title}  {name:15}{mean:8.3f} ({each}), {loss}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
