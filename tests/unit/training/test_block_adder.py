"""The sum of a block against the naive recursion, whatever the program does with its memory."""

import weakref
from collections.abc import Callable

import numpy as np
import pytest

from muster.collectives.reduction.tree import Block
from muster.program import Contribution
from muster.training.blocks import BlockAdder, Tasks, is_unshared
from muster.training.schema import GradientSchema, Leaf

LEAVES = 16


def add_up(
    adder: BlockAdder, block: Block, compute: Callable[[int], list[np.ndarray]], out: np.ndarray
) -> None:
    """Add a block whose leaves are computed at once."""

    def leaf(number: int) -> Tasks[list[np.ndarray]]:
        return compute(number)
        yield

    for _ in adder.add_up(block, leaf, out):
        pass


Gradients = dict[str, np.ndarray]


def gradients(leaf: int) -> Gradients:
    """Numbers of very different sizes: their sum in another order has other bits."""
    draw = np.random.default_rng(leaf)
    scale = np.float32(10) ** draw.integers(-6, 6, (3, 4)).astype(np.float32)
    matrix = draw.standard_normal((3, 4)).astype(np.float32) * scale
    return {"bias": np.array(draw.standard_normal(), np.float32), "weights": matrix}


SHAPE = GradientSchema.of({}, Contribution(gradients(0), 0.0), Leaf(0, 0))


def flat(made: Gradients) -> np.ndarray:
    return np.concatenate([made[name].reshape(-1) for name in sorted(made)])


def naive(block: Block) -> np.ndarray:
    if block.level == 0:
        return flat(gradients(block.number))
    left, right = block.halves
    return naive(left) + naive(right)


class Fresh:
    def __call__(self, leaf: int) -> list[np.ndarray]:
        made = gradients(leaf)
        return [made[name] for name in sorted(made)]


class OneBuffer(Fresh):
    """Writes every gradient over the one before."""

    def __init__(self) -> None:
        self.buffer = np.empty(13, np.float32)
        self.calls: list[int] = []

    def __call__(self, leaf: int) -> list[np.ndarray]:
        self.calls.append(leaf)
        self.buffer[:] = flat(gradients(leaf))
        return [self.buffer[:1].reshape(()), self.buffer[1:].reshape(3, 4)]


BLOCKS = [Block(0, 5), Block(1, 3), Block(2, 1), Block(3, 1), Block(4, 0)]


@pytest.mark.parametrize("program", [Fresh, OneBuffer])
@pytest.mark.parametrize("block", BLOCKS)
def test_block_has_the_bits_of_the_tree(block: Block, program: Callable[[], Fresh]) -> None:
    out = np.full(SHAPE.gradient_elements, 7, np.float32)
    add_up(BlockAdder(SHAPE, LEAVES), block, program(), out)
    assert out.tobytes() == naive(block).tobytes()


def test_adder_can_be_used_again() -> None:
    adder, compute = BlockAdder(SHAPE, LEAVES), OneBuffer()
    for block in BLOCKS:
        out = np.empty(SHAPE.gradient_elements, np.float32)
        add_up(adder, block, compute, out)
        assert out.tobytes() == naive(block).tobytes()


def test_every_leaf_is_computed_once() -> None:
    program = OneBuffer()
    out = np.empty(SHAPE.gradient_elements, np.float32)
    add_up(BlockAdder(SHAPE, LEAVES), Block(3, 0), program, out)
    assert program.calls == [0, 1, 2, 3, 4, 5, 6, 7]


class Keeper(Fresh):
    """Looks at what it returned, some way or other, once all is added up."""

    def __init__(self, keep: Callable[[list[np.ndarray]], object]) -> None:
        self.keep = keep
        self.kept: list[object] = []

    def __call__(self, leaf: int) -> list[np.ndarray]:
        made = list(super().__call__(leaf))
        self.kept.append(self.keep(made))
        return made


KEEPING: dict[str, Callable[[list[np.ndarray]], object]] = {
    "arrays": lambda made: made[1],
    "views": lambda made: made[1][1:],
    "buffers": lambda made: memoryview(made[1]),
    "weak references": lambda made: weakref.ref(made[1]),
}


@pytest.mark.parametrize("how", KEEPING)
def test_arrays_that_a_program_keeps_are_not_written_to(how: str) -> None:
    program = Keeper(KEEPING[how])
    out = np.empty(SHAPE.gradient_elements, np.float32)
    add_up(BlockAdder(SHAPE, LEAVES), Block(3, 0), program, out)
    assert out.tobytes() == naive(Block(3, 0)).tobytes()
    for leaf, kept in enumerate(program.kept):
        weights = gradients(leaf)["weights"]
        seen = kept() if isinstance(kept, weakref.ref) else kept
        if seen is not None:
            found = np.asarray(seen)
            assert found.tobytes() == weights[-len(found) :].tobytes()


def test_only_new_and_forgotten_arrays_are_unshared() -> None:
    assert is_unshared([np.empty(3, np.float32), np.empty((), np.float32)])
    frozen = np.empty(3, np.float32)
    frozen.flags.writeable = False
    name = np.empty(3, np.float32)
    twice = [np.empty(3, np.float32)] * 2
    view = [np.empty(6, np.float32)[:3]]
    bytes_of_another = [np.frombuffer(bytearray(12), np.float32)]
    matrix = [np.empty((1, 3), np.float32).view(np.matrix)]
    for arrays in ([frozen], [name], twice, view, bytes_of_another, matrix):
        assert not is_unshared(arrays)


def test_infinite_numbers_raise_no_warning() -> None:
    large = np.full(13, 3e38, np.float32)
    out = np.empty(13, np.float32)
    views = [large[:1].reshape(()), large[1:].reshape(3, 4)]
    add_up(BlockAdder(SHAPE, LEAVES), Block(2, 0), lambda _: [view.copy() for view in views], out)
    assert np.isinf(out).all()
