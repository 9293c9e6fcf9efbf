"""Bodies of loops: functions of the state and the batch, and such as are not.

``python -m tests.support.torch_bodies NAME ...`` trains each in a process and a directory of its
own, alone, and prints as JSON why it was refused, or "".
"""

# ruff: noqa: ANN401, ARG002, RUF012  a table of small classes

import gc
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss
from torch.utils.data import Dataset, TensorDataset

import muster.torch
from muster.program import InvalidProgram

SAMPLES, FEATURES, CLASSES = 136, 6, 3  # the last batch of an epoch has another shape


class Body:
    """A pure one: an MLP."""

    batch_size = 16
    epochs = 8  # 72 steps: one alone checks twice
    num_workers = 0
    optimizer: Any = torch.optim.SGD
    options: dict[str, Any] = {}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def data(self) -> Any:
        labels = torch.arange(SAMPLES) % CLASSES
        return TensorDataset(torch.randn(SAMPLES, FEATURES), labels)

    def begin(self, net: nn.Module, run: Any) -> None:
        """Register hooks, and make what the body keeps."""

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(net(x), y)

    def train(self) -> None:
        torch.manual_seed(0)
        net, data = self.model(), self.data()
        optimizer = type(self).optimizer(net.parameters(), lr=0.05)
        self.run = muster.torch.join(
            net,
            optimizer,
            data=data,
            batch_size=self.batch_size,
            epochs=self.epochs,
            num_workers=self.num_workers,
            **self.options,
        )
        self.begin(net, self.run)
        for x, y in self.run.shards():
            self.run.backward(self.loss(net, x, y))


# Functions of the state and the batch


class Dropout(Body):
    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(net(dropout(x + 0.1 * torch.randn_like(x))), y)


class Normed(Body):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


class Autocast(Body):
    optimizer = torch.optim.AdamW

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(net(x).float(), y)


class Slices(Body):
    """A collate that gives rows of a ring, each time at another place of a cache line."""

    def __init__(self) -> None:
        self.options = {"collate_fn": self.collate}
        self.ring, self.place = torch.zeros(1 << 16), 0

    def collate(self, items: list[Any]) -> Any:
        x = torch.stack([it for it, _ in items])
        self.place = (self.place + x.numel() + 1) % (1 << 15)
        out = self.ring[self.place : self.place + x.numel()].view(x.shape)
        return out.copy_(x), torch.stack([it for _, it in items])


class Padded(Body):
    """Sequences of several lengths, a weight of tokens, and worker processes."""

    num_workers = 2

    def __init__(self) -> None:
        self.options = {"collate_fn": pad}

    def model(self) -> nn.Module:
        return nn.LSTM(FEATURES, CLASSES, batch_first=True)

    def data(self) -> Any:
        return [torch.randn(2 + it % 5, FEATURES) for it in range(SAMPLES)]

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return net(x)[0].square().sum(2)[y].mean()


def pad(items: list[torch.Tensor]) -> Any:
    x = nn.utils.rnn.pad_sequence(items, batch_first=True)
    lengths = torch.tensor([len(it) for it in items])
    return x, torch.arange(x.shape[1]) < lengths[:, None]


class Noisy(Dataset[Any]):
    """Augmentation with the global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((FEATURES,), index / SAMPLES) + torch.rand(FEATURES), index % CLASSES


class Augmented(Body):
    num_workers = 2

    def data(self) -> Any:
        return Noisy()


class InHooks(Body):
    """What hooks change is in run.values, or registered."""

    def begin(self, net: nn.Module, run: Any) -> None:
        run.values["heat"] = 1.0

        @run.after_step
        def cool() -> None:
            run.values["heat"] *= 0.99

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(net(x) / self.run.values["heat"], y)


class Shadow:
    """An average as people write them: it keeps the tensors that it is given."""

    def __init__(self, net: nn.Module) -> None:
        self.tensors = {name: it.detach().clone() for name, it in net.named_parameters()}

    def state_dict(self) -> Any:
        return {"tensors": self.tensors}

    def load_state_dict(self, state: Any) -> None:
        self.tensors = state["tensors"]


class HoldsOnToItsState(Body):
    """Hooks keep references to what is registered, and to what is in run.values."""

    def begin(self, net: nn.Module, run: Any) -> None:
        shadow = Shadow(net)
        run.register(shadow=shadow)
        run.values["losses"] = []
        held: list[Any] = []

        @run.after_step
        def average() -> None:
            if not held:
                held.extend([run.values["losses"], *shadow.tensors.values()])
            losses, *tensors = held
            losses.append(run.loss)
            for tensor, parameter in zip(tensors, net.parameters(), strict=True):
                tensor.lerp_(parameter.detach(), 0.1)
            assert len(run.values["losses"]) == run.step
            assert all(it is tensors[at] for at, it in enumerate(shadow.tensors.values()))


class Compiled(Body):
    batch_size = 64  # 8 samples a shard, and 2 in the last step
    epochs = 2
    dynamic: bool | None = False

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, CLASSES))

    def begin(self, net: nn.Module, run: Any) -> None:
        self.compiled = torch.compile(net, dynamic=self.dynamic, backend="aot_eager")

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.compiled(x), y)


class InnerOptimizer(Body):
    """One that is made in the body, and keeps nothing for the next."""

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise = torch.zeros_like(x, requires_grad=True)
        inner = torch.optim.SGD([noise], lr=0.1)
        for _ in range(2):
            noise.grad = torch.autograd.grad(-cross_entropy(net(x + noise), y), noise)[0]
            inner.step()
        return cross_entropy(net(x + noise.detach()), y)


class Turns(Body):
    """Two models whose optimizers step in turns, each with a loss of its own."""

    epochs = 1

    def train(self) -> None:
        torch.manual_seed(0)
        self.nets: list[Any] = [self.model(), self.model()]
        self.own = torch.Generator().manual_seed(1)
        optimizers = [torch.optim.SGD(it.parameters(), lr=0.05) for it in self.nets]
        run = muster.torch.join(
            self.nets, optimizers, data=self.data(), batch_size=self.batch_size, num_workers=2
        )
        begun = self.nets[0][0].weight.detach().clone()
        for x, y in run.shards():
            run.backward(cross_entropy(self.nets[0](x), y), of=optimizers[0])
            optimizers[0].zero_grad()  # left in by habit, after a step that was left out
            run.backward(self.loss(self.nets[1], x, self.nets[0](x)), of=optimizers[1])
        assert not torch.equal(self.nets[0][0].weight, begun)

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(net(x), y)


# Others: each is refused for what its name says


class OwnGeneratorInATurn(Turns):
    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(net(x + torch.randn(x.shape, generator=self.own)), y)


class OwnGenerator(Body):
    def begin(self, net: nn.Module, run: Any) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=self.generator)
        return cross_entropy(net(x + noise), y)


class CarriedState(Body):
    def model(self) -> nn.Module:
        return nn.LSTMCell(FEATURES, CLASSES)

    def begin(self, net: nn.Module, run: Any) -> None:
        self.state: Any = None

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.state = net(x, self.state if self.state and len(self.state[0]) == len(x) else None)
        loss = cross_entropy(self.state[0], y)
        self.state = tuple(it.detach() for it in self.state)
        return loss


class Variable(Body):
    def begin(self, net: nn.Module, run: Any) -> None:
        self.seen = 0

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return cross_entropy(net(x), y) / self.seen


class ToAndFro(Body):
    """Comes round after two shards."""

    def begin(self, net: nn.Module, run: Any) -> None:
        self.flips = itertools.cycle([1.0, 2.0])

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(net(x), y) * next(self.flips)


class Clock(Body):
    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(net(x), y) * (1 + time.monotonic() % 1)


class Forwarding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.layer(x) * (1 + 1 / self.calls)


class Attribute(Body):
    def model(self) -> nn.Module:
        return Forwarding()


class RunningMean(Body):
    def begin(self, net: nn.Module, run: Any) -> None:
        self.mean = torch.zeros(FEATURES)

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return cross_entropy(net(x - self.mean), y)


class Counting(Dataset[Any]):
    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return torch.full((FEATURES,), float(self.read % 7)), index % CLASSES


class ItemsChange(Body):
    def data(self) -> Any:
        return Counting()


class OwnWorkerGenerator(Body):
    """In the worker processes the generator of the items goes on, here it is at its beginning."""

    num_workers = 2
    epochs = 16  # the first steps prefetch nothing

    def data(self) -> Any:
        return Counting()


class InPlace(Body):
    """Changes the memory of the data set."""

    def __init__(self) -> None:
        self.options = {"collate_fn": lambda items: items[0]}

    def data(self) -> Any:
        return [(torch.randn(1, FEATURES), torch.tensor([it % CLASSES])) for it in range(SAMPLES)]

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(net(x.mul_(1.1)), y)


class Teacher(Body):
    """A second optimizer steps in the body."""

    def begin(self, net: nn.Module, run: Any) -> None:
        self.teacher = nn.Linear(FEATURES, CLASSES)
        self.other = torch.optim.SGD(self.teacher.parameters(), lr=0.1)

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.other.zero_grad()
        wanted = self.teacher(x)
        cross_entropy(wanted, y).backward()
        self.other.step()
        return mse_loss(net(x), wanted.detach())


class Branches(Body):
    def model(self) -> nn.Module:
        return nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(2))

    def begin(self, net: Any, run: Any) -> None:
        with torch.no_grad():  # alike: the loss does not tell which is used
            net[1].weight.copy_(net[0].weight)
            net[1].bias.copy_(net[0].bias)
        self.turns = itertools.count()

    def loss(self, net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(net[next(self.turns) % 2](x), y)


class GradientHook(Body):
    def begin(self, net: Any, run: Any) -> None:
        self.scale = 1.0
        net[0].weight.register_hook(self.scaled)

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        self.scale *= 1.01
        return gradient * self.scale


class Averages(Body):
    """Moves an average in the body, as plain loops do."""

    def begin(self, net: nn.Module, run: Any) -> None:
        self.average = nn.Linear(FEATURES, 8)
        run.register(average=self.average)

    def loss(self, net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.average.weight.data.lerp_(net[0].weight.data, 0.1)
        return cross_entropy(net(x), y)


class Clamps(Body):
    def loss(self, net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for parameter in net.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        return cross_entropy(net(x), y)


class Remembers(Body):
    """Appends to a list of run.values, which is read-only in the body, but what it holds is not."""

    def begin(self, net: nn.Module, run: Any) -> None:
        run.values["seen"] = []

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.run.values["seen"].append(len(x))
        return cross_entropy(net(x), y)


class Counts(Body):
    """Each eighth batch counts more, as by `enumerate(run.shards())`."""

    batches = 0

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        return cross_entropy(net(x), y) * (1 + (self.batches % 8 == 0))


class Median(Body):
    """Compares its loss with those of other shards: that of one alone is seldom another one."""

    def begin(self, net: nn.Module, run: Any) -> None:
        self.losses: list[float] = []

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(net(x), y)
        self.losses.append(loss.item())
        return loss * (1 + (loss.item() > statistics.median(self.losses)))


class FlagAtALowLoss(Body):
    """Once one loss was low, all count half: in both computations of each later step."""

    scale = 1.0

    def data(self) -> Any:
        x = torch.randn(SAMPLES, FEATURES)
        return TensorDataset(x, x[:, :CLASSES].argmax(1))

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(net(x), y) * self.scale
        if loss.item() < 0.5:
            self.scale = 0.5
        return loss


class HookSetsAVariable(InHooks):
    """As `InHooks` does, in an attribute that is no part of the state."""

    heat = 1.0

    def begin(self, net: nn.Module, run: Any) -> None:
        @run.after_step
        def cool() -> None:
            self.heat *= 0.99

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(net(x) / self.heat, y)


class Halving(nn.Linear):
    """Does not load what it has saved."""

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        halves = {name: it / 2 for name, it in state_dict.items()}
        return super().load_state_dict(halves, *args, **options)


class RegistersHalving(Body):
    def begin(self, net: nn.Module, run: Any) -> None:
        run.register(average=Halving(FEATURES, 8))


class BeginsLate(OwnGenerator):
    """After the last step in which all check."""

    epochs = 2  # 18 steps

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().loss(net, x, y) if self.run.epoch else cross_entropy(net(x), y)


class Cached(Body):
    """What is made at the first call differs from what comes after."""

    def begin(self, net: nn.Module, run: Any) -> None:
        self.calls = 0

    def loss(self, net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return cross_entropy(net(x), y) * (1 if self.calls > 1 else 2)


class CompiledByDefault(Compiled):
    options = {}
    dynamic = None

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, CLASSES)
        )

    def begin(self, net: nn.Module, run: Any) -> None:
        self.compiled = torch.compile(net, dynamic=self.dynamic)


class Unchecked(OwnGenerator):
    options = {"check": False}


class AnyBits(OwnGenerator):
    def __init__(self) -> None:
        os.environ["MUSTER_BITS"] = "any"


PURE = [
    Body,
    Dropout,
    Normed,
    Autocast,
    Slices,
    Padded,
    Augmented,
    InHooks,
    HoldsOnToItsState,
    Compiled,
    InnerOptimizer,
    Turns,
    Unchecked,
    AnyBits,
]
IMPURE = {
    OwnGenerator: "its loss is not",
    CarriedState: "its loss is not",
    Median: "kept from earlier ones",
    FlagAtALowLoss: "a flag, a list of losses",
    HookSetsAVariable: "or a hook sets",
    RegistersHalving: "let load_state_dict take all",
    BeginsLate: "its loss is not",
    Variable: "its loss is not",
    ToAndFro: "its loss is not",
    Clock: "its loss is not",
    Attribute: "its loss is not",
    RunningMean: "its loss is not",
    Teacher: "an optimizer that muster.torch.join() does not have, SGD",
    OwnGeneratorInATurn: "its loss is not",
    ItemsChange: "its batch differs",
    OwnWorkerGenerator: "its batch differs",
    InPlace: "its batch differs",
    Branches: "other parameters are used",
    GradientHook: "only gradients",
    Averages: "may only read (registered.average.weight)",
    Clamps: "may only read (",
    Remembers: "may only read (run.values)",
    Counts: "a count of batches",
    Cached: "is made at the first call",
    CompiledByDefault: "dynamic=False or dynamic=True",
}
"""With the words of their refusal that name the cause."""


def outcome(name: str, results: Connection) -> None:
    sys.stdout = sys.stderr
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            globals()[name]().train()
            results.send("")
        except InvalidProgram as error:
            results.send(str(error))
        os._exit(0)


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")  # torch is imported once
    torch.compiler.reset()  # loads what each optimizer would load
    gc.freeze()  # forks leave these objects, and their pages, as they are
    found = {}
    for one in sys.argv[1:]:
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=outcome, args=(one, sender))
        process.start()
        sender.close()
        try:
            found[one] = receiver.recv()
        except EOFError:
            found[one] = "it ended without a result"
        process.join()
    sys.stdout.write(json.dumps(found))
