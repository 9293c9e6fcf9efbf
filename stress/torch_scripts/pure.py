"""Scripts whose body is a function of the state and the batch, in the shapes that people write."""

# ruff: noqa: NPY002, S311  the global generators

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize, rnn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset, WeightedRandomSampler

from stress.torch_scripts.frame import (
    CLASSES,
    CONTEXT,
    FEATURES,
    SAMPLES,
    STEPS,
    TOKENS,
    Gpt,
    Images,
    Loss,
    Residual,
    Script,
    Tagger,
    texts,
)


class Mnist(Script):
    """Convolutions, dropout, Adadelta, and a scheduler of epochs in a hook."""

    lr = 1.0

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Dropout2d(0.25), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.5)),
            *(nn.Linear(16, CLASSES), nn.LogSoftmax(1)),
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adadelta(self.net.parameters(), lr=self.lr)

    def data(self) -> Any:
        return TensorDataset(torch.randn(SAMPLES, 1, 8, 8), torch.arange(SAMPLES) % CLASSES)

    def begin(self) -> None:
        scheduler = StepLR(self.optimizer, 1, gamma=0.7)
        self.run.register(scheduler=scheduler)

        @self.run.after_step
        def each_epoch() -> None:
            if self.run.step % self.run.steps_per_epoch == 0:
                self.net.eval()
                scheduler.step()

    def loss(self, x: Any, y: Any) -> Loss:
        return functional.nll_loss(self.net(x), y)


class Lstm(Script):
    def model(self) -> nn.Module:
        return Tagger()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.net.parameters(), lr=0.01, amsgrad=True)

    def data(self) -> Any:
        text = texts()
        return TensorDataset(text[:, :-1], text[:, 1:])

    def loss(self, x: Any, y: Any) -> Loss:
        return cross_entropy(self.net(x)[0].flatten(0, 1), y.flatten())


class NanoGpt(Lstm):
    """Tied weights, two groups, clipping and a cosine of its own in a hook, a weight of tokens."""

    def model(self) -> nn.Module:
        return Gpt()

    def make_optimizer(self) -> torch.optim.Optimizer:
        groups: dict[float, list[Tensor]] = {0.1: [], 0.0: []}
        for it in self.net.parameters():
            groups[0.1 if it.dim() > 1 else 0.0].append(it)
        return torch.optim.AdamW(
            [{"params": its, "weight_decay": decay} for decay, its in groups.items()]
        )

    def begin(self) -> None:
        @self.run.before_step
        def adjust() -> None:
            clip_grad_norm_(self.net.parameters(), 1.0)
            for group in self.optimizer.param_groups:
                group["lr"] = 0.005 * (1 + np.cos(np.pi * self.run.step / STEPS))

    def loss(self, x: Any, y: Any) -> Loss:
        wanted = y.masked_fill(y == 0, -100)
        count = int((wanted != -100).sum())
        return cross_entropy(self.net(x).flatten(0, 1), wanted.flatten()), count


class Ema(Script):
    """A registered average of the weights is the teacher of what has no label."""

    def begin(self) -> None:
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.run.register(average=self.average)
        self.run.after_step(lambda: self.average.update_parameters(self.net))

    def loss(self, x: Any, y: Any) -> Loss:
        with torch.no_grad():
            wanted = self.average(x)
        noisy = self.net(x + 0.1 * torch.randn_like(x))
        return cross_entropy(noisy, y) + mse_loss(noisy, wanted)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)  # noqa: FBT003
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Any) -> Any:
        return self.base(x) + functional.dropout(x, 0.1, self.training) @ self.a.T @ self.b.T


class Lora(Script):
    """A frozen base, and an adapter that a hook freezes later."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            *(LowRank(it) if isinstance(it, nn.Linear) else it for it in super().model())
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        trained = [it for it in self.net.parameters() if it.requires_grad]
        return torch.optim.AdamW(trained, lr=0.02, fused=True)

    def begin(self) -> None:
        @self.run.after_step
        def freeze() -> None:
            if self.run.step == STEPS // 2:
                self.net[0].a.requires_grad_(False)  # noqa: FBT003


class Clipping(Script):
    """Gradients are clipped by a quantile of past norms, and get noise."""

    def begin(self) -> None:
        self.run.values["norms"] = []

        @self.run.before_step
        def clip() -> None:
            norms = self.run.values["norms"]
            norms.append(clip_grad_norm_(self.net.parameters(), np.inf).item())
            del norms[:-10]
            clip_grad_norm_(self.net.parameters(), float(np.median(norms)))
            for it in self.net.parameters():
                it.grad.add_(torch.randn_like(it), alpha=0.001)


class Orthogonal(torch.optim.Optimizer):
    """Momentum made orthogonal by Newton-Schulz iteration for matrices; else its sign."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for it in group["params"]:
                if it.grad is None:
                    continue
                state = self.state[it]
                state.setdefault("momentum", torch.zeros_like(it))
                state["steps"] = state.get("steps", 0) + 1
                moved = state["momentum"].mul_(0.9).add_(it.grad)
                if it.dim() > 1:
                    moved = moved / (moved.norm() + 1e-7)
                    for _ in range(5):
                        moved = 1.5 * moved - 0.5 * moved @ moved.T @ moved
                it.sub_(
                    moved if it.dim() > 1 else moved.sign(),
                    alpha=group["lr"] / state["steps"] ** 0.5,
                )


class Muon(Script):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return Orthogonal(self.net.parameters(), 0.05)


class Smoothed(Script):
    """Label smoothing, BatchNorm, RMSprop, drop_last, and a scheduler that looks at the loss."""

    def model(self) -> nn.Module:
        layers = (nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, CLASSES))
        return nn.Sequential(*layers)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.net.parameters(), lr=0.01, centered=True, momentum=0.5)

    def options(self) -> dict[str, Any]:
        return {"drop_last": True}

    def begin(self) -> None:
        plateau = ReduceLROnPlateau(self.optimizer, patience=2, threshold=0.1)
        self.run.register(plateau=plateau)
        self.run.after_step(lambda: plateau.step(self.run.loss))

    def loss(self, x: Any, y: Any) -> Loss:
        return cross_entropy(self.net(x), y, label_smoothing=0.1)


class Mixup(Smoothed):
    """Pairs of samples are mixed by the global generators of three libraries."""

    def loss(self, x: Any, y: Any) -> Loss:
        share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
        out = self.net(share * x + (1 - share) * x[order] + 0.01 * random.random())
        return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y[order])


class Weighted(Script):
    """Rare classes are drawn more often."""

    def data(self) -> Any:
        return TensorDataset(torch.randn(SAMPLES, FEATURES), (torch.rand(SAMPLES) * 2.2).long())

    def options(self) -> dict[str, Any]:
        return {"sampler": WeightedRandomSampler(torch.linspace(0.1, 1, SAMPLES).tolist(), 300)}


def padded(items: list[Any]) -> Any:
    lengths = torch.tensor([len(it) for it in items])
    return rnn.pad_sequence(items, batch_first=True), lengths


class Padded(Script):
    """Sequences of several lengths in worker processes, packed, and weighed by their tokens."""

    num_workers = 2

    def model(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "layers": nn.GRU(
                    FEATURES, 16, 2, batch_first=True, dropout=0.2, bidirectional=True
                ),
                "head": nn.Linear(32, FEATURES),
            }
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.NAdam(self.net.parameters(), lr=0.01)

    def data(self) -> Any:
        return [torch.randn(2 + it % 7, FEATURES).cumsum(0) for it in range(SAMPLES)]

    def options(self) -> dict[str, Any]:
        return {"collate_fn": padded}

    def loss(self, x: Any, y: Any) -> Loss:
        packed = rnn.pack_padded_sequence(x, y, batch_first=True, enforce_sorted=False)
        hidden, _ = rnn.pad_packed_sequence(self.net["layers"](packed)[0], batch_first=True)
        is_there = (torch.arange(x.shape[1]) < y[:, None] - 1)[:, :-1]
        errors = (self.net["head"](hidden)[:, :-1] - x[:, 1:]).square().mean(2)[is_there]
        return errors.mean(), len(errors)


class OneCycle(Script):
    """The rate and the momentum follow a scheduler."""

    def options(self) -> dict[str, Any]:
        return {"scheduler": OneCycleLR(self.optimizer, 0.1, total_steps=STEPS)}


class ResNet(Script):
    """BatchNorm, augmentation in worker processes, and memory saved by computing twice."""

    num_workers = 2

    def model(self) -> nn.Module:
        blocks = (Residual(8), nn.AvgPool2d(2), Residual(8))
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *blocks, *head)

    def data(self) -> Any:
        return Images()

    def loss(self, x: Any, y: Any) -> Loss:
        return cross_entropy(self.net(x), y)


class Parametrized(Script):
    """Weights that are orthogonal, of one norm, or of a norm by power iteration."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            parametrizations.orthogonal(nn.Linear(FEATURES, FEATURES)),
            nn.Tanh(),
            parametrizations.spectral_norm(nn.Linear(FEATURES, 16)),
            nn.Tanh(),
            parametrizations.weight_norm(nn.Linear(16, CLASSES)),
        )

    def loss(self, x: Any, y: Any) -> Loss:
        with parametrize.cached():
            return cross_entropy(self.net(x) + self.net(-x), y)


class Vae(Script):
    """Noise of a registered generator, and a weight of the divergence that a hook changes."""

    def model(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(FEATURES, 2 * 3), nn.Linear(3, FEATURES)])

    def begin(self) -> None:
        self.noise = torch.Generator().manual_seed(7)
        self.run.register(noise=self.noise)
        self.run.values["beta"] = 0.0

        @self.run.after_step
        def anneal() -> None:
            self.run.values["beta"] = min(1.0, self.run.step / 30)

    def loss(self, x: Any, y: Any) -> Loss:  # noqa: ARG002
        mean, log = self.net[0](x).chunk(2, 1)
        z = mean + (0.5 * log).exp() * torch.randn(mean.shape, generator=self.noise)
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum(1).mean()
        return mse_loss(self.net[1](z), x) + self.run.values["beta"] * divergence


class Contrastive(Script):
    """Two views of each sample, a trained temperature that a hook bounds, a checkpointed layer."""

    def model(self) -> nn.Module:
        net = super().model()
        net.temperature = nn.Parameter(torch.tensor(1.0))
        return net

    def begin(self) -> None:
        @self.run.after_step
        def bound() -> None:
            with torch.no_grad():
                self.net.temperature.clamp_(0.5, 1.5)

    def loss(self, x: Any, y: Any) -> Loss:  # noqa: ARG002
        views = [functional.dropout(x, 0.2) + 0.1 * torch.randn_like(x) for _ in range(2)]
        one, other = (
            functional.normalize(checkpoint(self.net, it, use_reentrant=False), dim=1)
            for it in views
        )
        return cross_entropy(one @ other.T / self.net.temperature, torch.arange(len(x)))


class Autocast(NanoGpt):
    """bfloat16."""

    def loss(self, x: Any, y: Any) -> Loss:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(x, y)


def bagged(items: list[Any]) -> Any:
    starts = np.cumsum([0, *(len(it) for it in items)])[:-1]
    return torch.cat(items), torch.tensor(starts)


class Bags(Script):
    """Bags of words, and experts of which a shard uses some."""

    def model(self) -> nn.Module:
        experts = [nn.Linear(FEATURES, CLASSES) for _ in range(3)]
        return nn.ModuleDict(
            {"bag": nn.EmbeddingBag(TOKENS, FEATURES), "experts": nn.ModuleList(experts)}
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.net.parameters(), lr=0.1)

    def data(self) -> Any:
        return [torch.randint(0, TOKENS, (1 + it % 5,)) for it in range(SAMPLES)]

    def options(self) -> dict[str, Any]:
        return {"collate_fn": bagged}

    def loss(self, x: Any, y: Any) -> Loss:
        expert = self.net["experts"][int(x.sum()) % 3]
        return cross_entropy(expert(self.net["bag"](x, y)), x[y] % CLASSES)


class Curriculum(Lstm):
    """Sequences grow while it trains, until the loss is low enough: all ranks end early."""

    def begin(self) -> None:
        self.run.values.update(length=3, best=100.0, bad=0)

        @self.run.after_step
        def change() -> None:
            v = self.run.values
            v["length"] = min(CONTEXT, 3 + self.run.step // 4)
            v["bad"] = 0 if self.run.loss < v["best"] else v["bad"] + 1
            v["best"] = min(v["best"], self.run.loss)
            if v["bad"] > 8 or self.run.step == STEPS - 4:
                self.run.stop()

    def loss(self, x: Any, y: Any) -> Loss:
        length = self.run.values["length"]
        return super().loss(x[:, :length], y[:, :length])


class Penalty(Script):
    """The norm of the gradient of an input is a part of the loss, as of a critic."""

    def loss(self, x: Any, y: Any) -> Loss:
        mixed = torch.lerp(x, x.roll(1, 0), torch.rand(len(x), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.net(mixed).sum(), mixed, create_graph=True)
        return cross_entropy(self.net(x), y) + (slope.norm(dim=1) - 1).square().mean()
