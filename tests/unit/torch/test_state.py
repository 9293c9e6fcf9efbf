"""Model and optimizer in memory that peers and checkpoints read."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from muster.checkpoints.export import SAFETENSORS, TORCH, export
from muster.checkpoints.listing import checkpoint_dirs
from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.manifest import VALUES
from muster.contracts.shards import Position
from muster.program import InvalidProgram
from muster.torch.state import TrainingState
from muster.training.state_sync import Committed
from tests.support.checkpoint_ranks import Rank

OPTIMIZERS: dict[str, Callable[[list[object]], object]] = {
    "sgd": lambda them: torch.optim.SGD(them, lr=0.1),
    "momentum": lambda them: torch.optim.SGD(them, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda them: torch.optim.Adam(them, amsgrad=True),
    "adamw": lambda them: torch.optim.AdamW(them, fused=True),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda them: torch.optim.RMSprop(them, momentum=0.5, centered=True),
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
}


class Observed(torch.nn.Linear):
    """As quantization-aware training makes it: with an observer that has seen nothing."""

    def __init__(self, begins_with: object) -> None:
        super().__init__(2, 1)
        self.register_buffer("min_val", torch.tensor(begins_with))


class HalfExtraState(torch.nn.Linear):
    def get_extra_state(self) -> object:
        return {"seen": 3}


class Extra(torch.nn.Linear):
    """Has state that is no tensor of the model, and a table of complex numbers."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.seen, self.scale = 0, torch.ones(2, dtype=torch.bfloat16)
        self.register_buffer("table", torch.polar(torch.ones(3), torch.arange(3.0)))

    def get_extra_state(self) -> object:
        return {"seen": self.seen, "scale": self.scale}

    def set_extra_state(self, state: object) -> None:
        self.seen, self.scale = state["seen"], state["scale"]


class Kept:
    def state_dict(self) -> dict[str, float]:
        return {"best": 0.5}

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class Plain(torch.optim.Optimizer):
    """One whose options and state are the same in every version of torch."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.5})

    def step(self, closure: object = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                kept["steps"] = kept.get("steps", 0) + 1
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


class Staged(TrainingState):
    """Keeps its tensors apart from the replica, as those of a GPU are."""

    def is_staged(self, tensor: object) -> bool:  # noqa: ARG002
        return True


@dataclass
class Trained:
    """A small model that takes steps by hand."""

    kind: str
    of: type[TrainingState] = TrainingState
    state: TrainingState = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
        groups = [{"params": list(it.parameters())} for it in self.model]
        self.optimizer = OPTIMIZERS[self.kind](groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.state = self.of(self.model, self.optimizer)
        self.state.register("scheduler", self.scheduler)
        self.state.allocate()

    def step(self, number: int) -> None:
        for parameter in self.model.parameters():
            generator = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.state.step_optimizer()
        self.scheduler.step()

    def bits(self) -> bytes:
        self.state.encode()
        self.state.replica.digest()
        state = self.state.replica.other
        return b"".join(np.ascontiguousarray(state[name]).tobytes() for name in sorted(state))


@pytest.mark.parametrize("kind", ["adagrad", "adamw"])
def test_what_an_optimizer_has_at_join_is_kept(kind: str) -> None:
    ours, plain = Trained(kind), Trained(kind)
    for one in (ours, plain):
        one.model.zero_grad()
        parameters = one.model.parameters()
        one.optimizer = OPTIMIZERS[kind]([{"params": [it]} for it in parameters])
        if kind == "adamw":
            sum(it.square().sum() for it in one.model.parameters()).backward()
            one.optimizer.step()
    ours.state = TrainingState(ours.model, ours.optimizer)
    ours.state.allocate()
    first, second = (
        [value for state in it.optimizer.state.values() for value in state.values()]
        for it in (ours, plain)
    )
    assert first
    assert all(torch.equal(*them) for them in zip(first, second, strict=True))
    for name, array in ours.state.initial.items():
        assert np.array_equal(array, ours.state.replica.other[name])


@pytest.mark.slow
@pytest.mark.parametrize("other", [TrainingState, Staged])
@pytest.mark.parametrize("of", [TrainingState, Staged])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_copy_of_the_state_goes_on_with_the_same_bits(
    kind: str, of: type[TrainingState], other: type[TrainingState]
) -> None:
    first, second = Trained(kind, of), Trained(kind, other)
    for number in range(3):
        first.step(number)
    values = first.state.encode()
    first.state.replica.digest()  # as every reader does
    second.state.replica.commit(first.state.replica.other, Committed(position=Position(step=3)))
    second.state.take_over(values)
    first.step(3)
    second.step(3)
    assert first.bits() == second.bits()
    assert first.state.encode() == second.state.encode()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_in_our_memory_are_those_of_plain_torch(kind: str) -> None:
    ours, plain = Trained(kind), Trained(kind)
    copy = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
    copy.load_state_dict(plain.model.state_dict())
    optimizer = OPTIMIZERS[kind]([{"params": list(it.parameters())} for it in copy])
    for number in range(3):
        for parameter in copy.parameters():
            generator = torch.Generator().manual_seed(number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.param_groups[0]["lr"] = ours.optimizer.param_groups[0]["lr"]
        optimizer.param_groups[1]["lr"] = ours.optimizer.param_groups[1]["lr"]
        optimizer.step()
        ours.step(number)
    wanted = copy.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in ours.model.state_dict().items())
    for parameter in ours.model.parameters():
        for value in ours.optimizer.state[parameter].values():
            assert not isinstance(value, torch.Tensor) or value.data_ptr() % 64 == 0


SCHEDULERS: dict[str, Callable[[object], object]] = {
    "multi-step": lambda it: torch.optim.lr_scheduler.MultiStepLR(it, [2, 4], gamma=0.5),
    "one cycle": lambda it: torch.optim.lr_scheduler.OneCycleLR(it, 0.5, total_steps=9),
    "restarts": lambda it: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(it, 2),
    "lambda": lambda it: torch.optim.lr_scheduler.LambdaLR(it, lambda step: 1 / (1 + step)),
    "sequence": lambda it: torch.optim.lr_scheduler.SequentialLR(
        it,
        [
            torch.optim.lr_scheduler.LinearLR(it, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(it, 0.9),
        ],
        [3],
    ),
    "cyclic": lambda it: torch.optim.lr_scheduler.CyclicLR(it, 0.1, 0.2, step_size_up=2),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_copy_of_a_scheduler_goes_on_with_the_same_rates(kind: str) -> None:
    first, second = Trained("momentum"), Trained("momentum")
    rates = []
    for one in (first, second):
        one.scheduler = SCHEDULERS[kind](one.optimizer)
        one.state.registered["scheduler"] = one.scheduler
    for number in range(8):
        first.step(number)
        if number == 3:
            second.state.replica.commit(
                first.state.replica.other, Committed(position=Position(step=4))
            )
            second.state.take_over(first.state.encode())
        elif number > 3:
            second.step(number)
            rates.append([one.optimizer.param_groups[0]["lr"] for one in (first, second)])
    assert [first for first, _ in rates] == [second for _, second in rates]
    assert first.bits() == second.bits()


def test_arrays_and_infinities_of_registered_objects_are_part_of_the_state() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        average = torch.optim.swa_utils.AveragedModel(model)
        state = TrainingState(model, optimizer)
        state.register("plateau", plateau)
        state.register("average", average)
        state.allocate()
        states.append(state)
    first, second = states
    first.registered["average"].update_parameters(torch.nn.Linear(2, 2))
    content = first.encode()
    second.replica.commit(first.replica.other, Committed(position=Position(step=1)))
    second.take_over(content)
    assert second.registered["plateau"].best == float("inf")
    for name, value in first.registered["average"].state_dict().items():
        assert torch.equal(value, second.registered["average"].state_dict()[name])
    assert second.encode() == content
    del second.registered["average"]
    with pytest.raises(InvalidProgram, match=r"objects \['average', 'plateau'\], and this"):
        second.take_over(content)


def freeze(state: TrainingState) -> None:
    state.parameters["weight"].requires_grad_(requires_grad=False)
    state.parameters["bias"].requires_grad_(requires_grad=True)


def slow_down(state: TrainingState) -> None:
    state.step_optimizer()  # without gradients
    state.registered["scheduler"].step()


def count(state: TrainingState) -> None:
    state.model.seen, state.model.scale = 7, torch.full((2,), 1.5, dtype=torch.bfloat16)
    state.model.table[1] = 2j


HOOKS = [freeze, slow_down, count]


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_hook_changes_is_in_the_state(hook: Callable[[TrainingState], None]) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Extra()
        model.bias.requires_grad_(requires_grad=False)
        rate = torch.tensor(0.1)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
        state = TrainingState(model, optimizer)
        state.register("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7))
        state.allocate()
        assert optimizer.param_groups[0]["lr"] is rate
        states.append((state, rate))
    (first, _), (second, rate) = states
    before = first.encode()
    hook(first)
    content = first.encode()
    second.replica.commit(first.replica.other, Committed(position=Position(step=1)))
    second.take_over(content)
    assert second.encode() == content
    assert torch.equal(rate, first.optimizers[0].param_groups[0]["lr"])
    assert second.optimizers[0].param_groups[0]["lr"] is rate  # others may refer to it
    assert torch.equal(second.model.table, first.model.table)
    assert second.extra_state() == first.extra_state()
    flags = [[it.requires_grad for it in state.model.parameters()] for state, _ in states]
    assert flags[0] == flags[1]
    assert (b"requires_grad" in content) == (hook is freeze)
    second.take_over(before)  # a state without what a hook has changed undoes that
    assert second.encode() == before


def test_states_without_newer_parts_keep_their_digest() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    model.register_buffer("short", torch.ones(2, dtype=torch.bfloat16))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + number)
    state = TrainingState(model, Plain([{"params": list(it.parameters())} for it in model]))
    state.register("kept", Kept())
    state.values["seen"] = 3
    state.allocate()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.step_optimizer()
    committed = Committed(position=Position(step=1), values=state.encode())
    state.replica.commit(state.replica.other, committed)
    # Computed before these parts existed: it is the identity of checkpoints on disk.
    assert state.replica.digest() == "e05a0f488f4f0e47a5caeb74c97e07fe"


def test_numbers_that_numpy_lacks_keep_their_bits() -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    before = model.weight.detach().clone()
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state.allocate()
    assert torch.equal(model.weight, before)
    assert state.replica.other["model.weight"].dtype == np.int16


class Tied(torch.nn.Module):
    """A bfloat16 model with a tied parameter, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = torch.nn.Embedding(3, 4), torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.to(torch.bfloat16)


def test_extra_state_and_complex_numbers_are_exported(tmp_path: Path) -> None:
    model, other = Extra(), Extra()
    model.seen, model.table[0] = 5, 3j
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=1))
    state.register("average", torch.optim.swa_utils.AveragedModel(model))
    state.allocate()
    arrays = {name: array.copy() for name, array in state.replica.other.items()}
    manager = Rank(LocalFileSystem(), directory=tmp_path / "job").manager
    manager.save(1, Position(step=1), {**arrays, VALUES: state.encode().decode()})
    checkpoint = checkpoint_dirs(tmp_path / "job")[0].newest()
    export(checkpoint, tmp_path / "all.pt", TORCH)
    other.load_state_dict(torch.load(tmp_path / "all.pt", weights_only=True)["model"])
    assert (other.seen, other.scale.dtype) == (5, torch.bfloat16)
    export(checkpoint, tmp_path / "model.safetensors", SAFETENSORS, only="model")
    load = pytest.importorskip("safetensors.torch").load_file
    table = load(tmp_path / "model.safetensors")["table"]
    assert torch.equal(model.table, other.table)
    assert torch.equal(model.table, table)


def test_each_of_several_optimizers_is_exported_as_its_own_part(tmp_path: Path) -> None:
    model, others = Tied(), Tied()
    kinds = {"optimizer": torch.optim.AdamW, "optimizer1": torch.optim.SGD}
    trained = (model.norm.parameters(), [model.embed.weight])
    optimizers = [kind(it, lr=0.1) for kind, it in zip(kinds.values(), trained, strict=True)]
    state = TrainingState(model, optimizers)
    state.allocate()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.step_optimizer()
    arrays = {name: array.copy() for name, array in state.replica.other.items()}
    manager = Rank(LocalFileSystem(), directory=tmp_path / "job").manager
    manager.save(1, Position(step=1), {**arrays, VALUES: state.encode().decode()})
    export(checkpoint_dirs(tmp_path / "job")[0].newest(), tmp_path / "all.pt", TORCH)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    loaded = (others.norm.parameters(), [others.embed.weight])
    for (part, kind), wanted, parameters in zip(kinds.items(), optimizers, loaded, strict=True):
        (resumed := kind(parameters, lr=1)).load_state_dict(found[part])
        assert resumed.state_dict()["param_groups"] == wanted.state_dict()["param_groups"]
        assert str(resumed.state_dict()["state"]) == str(wanted.state_dict()["state"])


def test_an_export_is_what_plain_torch_loads(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    groups = [{"params": model.norm.parameters(), "lr": 0.5}, {"params": [model.embed.weight]}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    state = TrainingState(model, optimizer)
    state.register("scheduler", scheduler)
    state.register("average", average)
    state.allocate()
    state.values["best"] = 0.5
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.step_optimizer()
    arrays = {name: array.copy() for name, array in state.replica.other.items()}
    manager = Rank(LocalFileSystem(), directory=tmp_path / "job").manager
    manager.save(1, Position(step=1), {**arrays, VALUES: state.encode().decode()})
    checkpoint = checkpoint_dirs(tmp_path / "job")[0].newest()

    export(checkpoint, tmp_path / "all.pt", TORCH)
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (found["values"], found["registered"]["scheduler"]["step_size"]) == ({"best": 0.5}, 2)
    average.load_state_dict(found["registered"]["average"])
    other.load_state_dict(found["model"])
    assert all(torch.equal(*them) for them in zip(model.buffers(), other.buffers(), strict=True))
    resumed = torch.optim.AdamW(
        [{"params": other.norm.parameters()}, {"params": [other.embed.weight]}]
    )
    resumed.load_state_dict(found["optimizer"])
    wanted, given = optimizer.state_dict(), resumed.state_dict()
    assert given["param_groups"] == wanted["param_groups"]
    assert [*given["state"]] == [*wanted["state"]] == [0, 1, 2]
    for number, kept in wanted["state"].items():
        assert all(torch.equal(given["state"][number][key], it) for key, it in kept.items())

    export(checkpoint, tmp_path / "model.safetensors", SAFETENSORS, only="model")
    safe = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model.safetensors")
    assert {it.dtype for it in safe.values()} == {torch.bfloat16, torch.int64}
    other.load_state_dict(safe)
    assert torch.equal(other.head.weight, model.head.weight)


REFUSED = [
    (lambda model: [[torch.optim.SGD(model.parameters(), lr=1)]], "is a list"),
    (
        lambda model: [torch.optim.SGD(model.parameters(), lr=1) for _ in range(2)],
        "two optimizers have the parameter 'weight'",
    ),
    (lambda model: torch.optim.SGD([model.weight], lr=1), "not have the parameter 'bias'"),
    (lambda model: torch.optim.LBFGS(model.parameters()), "without a closure"),
    (lambda _: torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1), "model.parameters"),
    (lambda model: torch.optim.SparseAdam(model.parameters()), "sparse=False"),
]


@pytest.mark.parametrize(("make", "problem"), REFUSED)
def test_an_optimizer_that_cannot_be_shared_is_refused(
    make: Callable[[object], object], problem: str
) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(InvalidProgram, match=problem):
        TrainingState(model, make(model))


def test_the_order_of_values_is_that_of_the_program() -> None:
    model = torch.nn.Linear(1, 1)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=1))
    state.allocate()
    state.values |= {"b": 1, "a": (2, float("inf"))}
    content = state.encode()
    state.values.clear()
    state.take_over(content)
    assert [*state.values.items()] == [("b", 1), ("a", (2, float("inf")))]


UNSUITABLE = [
    (lambda: torch.nn.Linear(2, 1, device="meta"), "'weight' is on the device meta"),
    (
        lambda: torch.nn.Linear(2, 1, dtype=torch.complex64),
        "'weight' has the dtype torch.complex64",
    ),
    (lambda: torch.nn.LazyLinear(2), "'weight' has no shape or values yet"),
    (lambda: Observed(float("inf")), "'min_val' has no shape or values yet"),
    (lambda: Observed([]), "'min_val' has no shape or values yet"),
    (lambda: HalfExtraState(2, 1), "one of get_extra_state and set_extra_state"),
]


@pytest.mark.parametrize(("make", "problem"), UNSUITABLE)
def test_a_model_that_cannot_be_shared_is_refused(make: Callable[[], object], problem: str) -> None:
    model = make()
    with pytest.raises(InvalidProgram, match=problem):
        TrainingState(model, torch.optim.SGD(model.parameters(), lr=1))


def test_what_takes_the_place_of_a_tensor_of_the_model_stays_in_our_memory() -> None:
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    state = TrainingState(model, optimizer)
    state.allocate()
    model.running_mean = model.running_mean + 3
    model.weight.data = model.weight.data * 2
    model.bias = torch.nn.Parameter(torch.full((2,), 4.0))
    state.adopt_model()
    names = ("model.running_mean", "model.weight", "model.bias")
    assert [state.replica.other[name].tolist() for name in names] == [[3, 3], [2, 2], [4, 4]]
    assert model.bias is optimizer.param_groups[0]["params"][1]
