"""What a script's state may hold: tensors, nested dicts, integer keys; it comes back as it was."""

import re
import sys
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from muster.checkpoints.errors import CheckpointMismatch, UnsupportedState
from muster.checkpoints.format import pack, unpack
from muster.checkpoints.nested import ARRAYS, flatten, load_into, unflatten


def round_trip(state: dict[str, Any]) -> dict[str, Any]:
    packed = pack(flatten(state))
    content = bytearray().join(packed.buffers) if packed.buffers else None
    values = msgspec.json.decode(msgspec.json.encode(packed.values))
    return unflatten(unpack(content, values, "f"))


def exactly(value: object) -> str:
    """Return text that tells apart types, dtypes, shapes, bits and the order of keys."""
    if isinstance(value, dict):
        name = "Counter" if isinstance(value, Counter) else "dict"
        items = [f"{key!r}: {exactly(item)}" for key, item in value.items()]
        return f"{name}({', '.join(items)})"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(exactly, value))})"
    if isinstance(value, np.ndarray):
        return f"array({value.dtype} {value.shape} {value.tobytes().hex()})"
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        torch = sys.modules["torch"]
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"tensor({value.dtype} {tuple(value.shape)} {value.requires_grad} {bits.hex()})"
    return repr(value)


def assert_same(state: dict[str, Any]) -> None:
    found = round_trip(state)
    assert {name: exactly(it) for name, it in found.items()} == {
        name: exactly(it) for name, it in state.items()
    }


PLAIN: dict[str, Any] = {
    "weights": np.ones((2, 3), np.float32),
    "scale": np.float64(2.5),
    "history": [1, (2.5, None), {"loss": float("nan")}],
    "best": {"loss": np.float64(0.5), "name": np.str_("a")},
}


def test_plain_state_is_saved_as_before() -> None:
    assert flatten(PLAIN) == PLAIN
    assert pack(flatten(PLAIN)) == pack(PLAIN)


NESTED_STATES = {
    "integer keys": {"a": {0: "x", -1: {True: None}, "1": 2}},
    "a counter": {"milestones": Counter({30: 1, 80: 2})},
    "nested arrays": {"a": {"b": [np.arange(3), (np.ones((), np.int8),)]}, "n": 1},
    "names that collide": {"a": {"b": np.zeros(1), "b_": np.ones(1)}, "a.b": np.arange(2)},
    "a name like the list of arrays": {"muster": {"arrays": np.arange(2)}},
    "a random generator": {"random": np.random.MT19937(7).state},
}


@pytest.mark.parametrize("state", NESTED_STATES.values(), ids=list(NESTED_STATES))
def test_nested_state_round_trips(state: dict[str, Any]) -> None:
    assert_same(state)


class Foo:
    pass


LOOP: list[Any] = []
LOOP.append({0: LOOP})


REFUSED = {
    "a custom object": (
        {"opt": {"state": {0: [{"x": Foo()}]}}},
        r"^state\['opt'\]\['state'\]\[0\]\[0\]\['x'\] is of the type Foo, which a check",
    ),
    "a tuple as key": (
        {"a": {(1, 2): 3}},
        r"^state\['a'\] has the key \(1, 2\): use strings and int",
    ),
    "a loop": ({"a": LOOP}, r"^state\['a'\] is nested too deeply, or contains itself"),
    "the reserved name": ({ARRAYS: 1}, "use another name"),
}


@pytest.mark.parametrize(("state", "words"), REFUSED.values(), ids=list(REFUSED))
def test_unsupported_value_is_refused_with_its_path(state: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedState, match=words):
        pack(flatten(state))


def test_restoring_tensors_without_torch_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    flat = {"w": np.zeros(2), ARRAYS: {"w": {"torch": "float64"}}}
    with pytest.raises(CheckpointMismatch, match=f"{sys.executable} has no torch: install it"):
        unflatten(flat)


def test_tensors_of_every_dtype_round_trip() -> None:
    torch = pytest.importorskip("torch")
    integers = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    dtypes = [*integers, torch.float16, torch.bfloat16, torch.float32, torch.float64]
    state = {f"{dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    odd = {
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "leaf": torch.ones(2, requires_grad=True),
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
    }
    assert_same({**state, **odd})
    assert {"torch.float32", "a.b", "a.b_"} <= {*flatten({**state, **odd})}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_optimizer_and_scheduler_resume_with_the_same_bits(optimizer: str) -> None:
    torch = pytest.importorskip("torch")

    def parts() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        groups = [{"params": each.parameters(), "lr": 0.1} for each in model]
        extra = {"momentum": 0.9} if optimizer == "SGD" else {}
        made = getattr(torch.optim, optimizer)(groups, **extra)
        return model, made, torch.optim.lr_scheduler.MultiStepLR(made, [2, 4])

    def train(model: Any, optimizer: Any, scheduler: Any, steps: range) -> dict[str, Any]:  # noqa: ANN401
        for step in steps:
            optimizer.zero_grad()
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
            scheduler.step()
        kept = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return {name: it.state_dict() for name, it in kept.items()}

    calm = train(*parts(), range(6))
    saved = train(*parts(), range(3))
    assert_same(saved)
    restored, resumed = round_trip(saved), parts()
    for name, part in zip(restored, resumed, strict=True):
        part.load_state_dict(restored[name])
    assert exactly(train(*resumed, range(3, 6))) == exactly(calm)


def test_state_that_does_not_fit_changes_nothing() -> None:
    torch = pytest.importorskip("torch")

    def parts(*layers: Any) -> dict[str, Any]:  # noqa: ANN401
        model = torch.nn.Sequential(*layers)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    saving = parts(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    saving["model"](torch.ones(1, 2)).sum().backward()
    saving["optimizer"].step()
    state = round_trip({name: it.state_dict() for name, it in saving.items()})
    fewer = [{"params": [*saving["model"].parameters()][:2]}]
    misfits = {
        "0.weight is of shape (3, 2) there and of shape (4, 2) here": parts(
            torch.nn.Linear(2, 4), torch.nn.Linear(3, 2)
        ),
        "1.weight is of shape (2, 3) there and missing here": parts(torch.nn.Linear(2, 3)),
        "1.bias is of shape (2,) there and missing here": parts(
            torch.nn.Linear(2, 3), torch.nn.Linear(3, 2, bias=False)
        ),
        "2.weight is missing there and of shape (1, 2) here": parts(
            torch.nn.Linear(2, 3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)
        ),
        "'ema': it has only model, optimizer": {**saving, "ema": torch.nn.Linear(1, 1)},
        "'optimizer': param_groups.0.params is of shape (4,) there and of shape (2,) here": {
            "model": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)),
            "optimizer": torch.optim.AdamW(fewer),
        },
    }
    for problem, objects in misfits.items():
        before = exactly({name: it.state_dict() for name, it in objects.items()})
        with pytest.raises(CheckpointMismatch, match=re.escape(problem)):
            load_into(objects, state, 3)
        assert exactly({name: it.state_dict() for name, it in objects.items()}) == before
    resumed = parts(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
    load_into(resumed, state, 3)
    assert exactly({name: it.state_dict() for name, it in resumed.items()}) == exactly(
        {name: it.state_dict() for name, it in saving.items()}
    )
    load_into(resumed, state, 3)


@pytest.mark.parametrize("kind", ["sparse", "without data", "complex"])
def test_tensor_that_cannot_be_saved_is_named(kind: str) -> None:
    torch = pytest.importorskip("torch")
    made = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "without data": lambda: torch.empty(2, device="meta"),
        "complex": lambda: torch.zeros(2, dtype=torch.complex128),
    }
    with pytest.raises(UnsupportedState, match=r"\bx\b|x'"):
        pack(flatten({"a": {"x": made[kind]()}}))
