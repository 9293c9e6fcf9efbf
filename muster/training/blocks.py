"""Computes what a rank adds to the sum of a step: the contributions of its blocks, leaf by leaf.

A leaf is one virtual shard. Its samples, shapes and random numbers are functions of (seed, epoch,
step, shard) alone, so it has the same bits on every rank and every time.

The sum of a block grows in the arrays of its first leaf where possible: a gradient that the program
has just made, returned and dropped all references to may be overwritten. n leaves then cost n - 1
in-place additions of data that is still in the cache. Arrays that the program may still read, or
write to in its next call, are copied first.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar
from weakref import getweakrefcount

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Backend
from muster.collectives.reduction.compressed import Compression
from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.tree import Block
from muster.contracts.errors import MusterError
from muster.datasets.random_access import RandomAccess
from muster.program import Contribution, Program, State
from muster.training.batches import BatchLoader, BlockBatches, decoder_of
from muster.training.loader import program_error
from muster.training.sample_count import COUNT_ELEMENTS
from muster.training.schedule import Schedule
from muster.training.schema import GradientSchema, Leaf, StateSchema, read_only

if TYPE_CHECKING:
    from muster.training.groups.state_sync import Replica

Arrays: TypeAlias = Sequence[Vector]


class LeafTask:
    """A leaf that is to be computed; its `contribution` is set before the next one is taken.

    The contribution leaves the task as soon as it is used: whatever else refers to an array keeps
    it from being overwritten.
    """

    __slots__ = ("batch", "contribution", "is_again", "leaf", "state", "weight")

    def __init__(
        self, leaf: Leaf, state: State, opened: BlockBatches, place: int, *, is_again: bool = False
    ) -> None:
        self.leaf: Final = leaf
        self.is_again: Final = is_again  # out of order, to be compared: nothing was prepared for it
        self.state: Final = state
        self.batch: Final = opened.batches[place]
        self.weight = float(opened.weights[place])  # may be replaced, too
        self.contribution: Contribution | None = None

    def take(self) -> Contribution:
        """Return the contribution and forget it."""
        contribution, self.contribution = self.contribution, None
        if contribution is None:
            raise RuntimeError(f"nothing was computed {self.leaf}")
        return contribution


STOP_REQUESTS: Final = -1
"""The element of the summed vector that counts the ranks whose program wants to stop."""

Result = TypeVar("Result")
Tasks: TypeAlias = Generator[LeafTask, None, Result]
"""Yields the leaves that have to be computed on the way to a result."""

ComputeLeaf: TypeAlias = Callable[[int], Tasks[list[Vector]]]
"""Returns the gradients of a leaf in a new list; the caller may overwrite the arrays."""

_NOT_PROGRAM_ERRORS: Final = (MusterError, MemoryError)
"""Errors that pass through a program's functions without being the program's fault."""

_NOTHING_BUFFERED: Final = 4
"""Philox makes four numbers at a time; this buffer position means that all are used."""


class BusyFlag:
    """True while a thread computes, for the heartbeat thread to read: ``with busy: …``.

    A rank that hangs in its program makes all others wait, and it alone is to be replaced. The flag
    marks the work and not the waiting: few places compute, and a wait that is not marked must not
    end a process.
    """

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> None:
        self.is_set = True

    def __exit__(self, *_: object) -> None:
        self.is_set = False


class LeafRng:
    """Random numbers of a leaf, as a function of (seed, epoch, step, shard); for one thread.

    The counter-based generator has a place for each leaf. Moving there takes 1 us; a new generator
    would take 10 us and ask the system for entropy.
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed, 0], np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._start = self._bits.state
        self._start["buffer_pos"] = _NOTHING_BUFFERED
        self._counter = self._start["state"]["counter"]

    def at(self, epoch: int, leaf: Leaf) -> np.random.Generator:
        """Return a generator at the start of the leaf's numbers, valid until the next call."""
        self._counter[:] = (0, epoch, leaf.step, leaf.shard)
        self._bits.state = self._start
        return self._generator


class BlockAdder:
    """Sums blocks of at most `leaves` leaves in the order of the tree; for one thread."""

    def __init__(self, schema: GradientSchema, leaves: int) -> None:
        self._schema = schema
        # A row takes memory only once it is written to, when a leaf has to be copied.
        self._copies = np.empty((leaves.bit_length() - 1, schema.gradient_elements), np.float32)
        self.parts: list[tuple[Block, Arrays]] = []
        """The largest finished nodes of the block, from left to right, and their sums."""

    def add_up(self, block: Block, compute: ComputeLeaf, out: Vector) -> Tasks[None]:
        """Write the sum of a block into `out`, all gradients one after the other.

        If `compute` raises, `parts` holds what is finished.
        """
        views, self.parts = self._schema.views(out), []
        with np.errstate(all="ignore"):  # `BlockComputer` reports what is not finite
            for leaf in range(block.start, block.stop):
                node, gradients = Block(0, leaf), (yield from compute(leaf))
                sums: Arrays = gradients  # of a right leaf are only read
                if node.number % 2 == 0 or node == block:
                    sums = self._writable(gradients, views, is_last=node == block)
                # A right half is complete, and its left half is the part before it.
                while self.parts and node.number % 2:
                    left, others = self.parts.pop()
                    node = Block(left.level + 1, left.number // 2)
                    target = views if node == block else others
                    _add(others, sums, target)
                    sums = target
                self.parts.append((node, sums))

    def _writable(self, gradients: list[Vector], views: Arrays, *, is_last: bool) -> Arrays:
        """Return the gradients of a leaf in arrays that can be added to."""
        if not is_last and is_unshared(gradients):
            return gradients
        # `out` is free until the last addition.
        place = self._schema.views(self._copies[len(self.parts)]) if self.parts else views
        _copy(gradients, place)
        return place


class Loader(Protocol):
    """Loads what leaves compute with."""

    def load(self, step: int, block: Block) -> BlockBatches:
        """Return the batches of a block. Raises `DatasetError`."""


class _OpenBlock:
    """What the computation of a block needs at its end."""

    def __init__(
        self, block: Block, state: State, step: int, loaded: BlockBatches, *, is_again: bool
    ) -> None:
        self.block: Final = block
        self.state: Final = state
        self.step: Final = step
        self.loaded: Final = loaded
        self.is_again: Final = is_again
        self.numbers: Final[list[Sequence[float]]] = [()] * block.size
        """Loss, weight and metrics of each leaf."""


class Checks:
    """Compares what ranks compute again with what they have added up; this class does not."""

    def meet(
        self,
        backend: Backend,  # noqa: ARG002
        replica: "Replica",  # noqa: ARG002
        check: Callable[[], None],  # noqa: ARG002
    ) -> Tasks[None]:
        """Note the members of a group, and their state, before its first step; all call this.

        `check` is called before each leaf.
        """
        yield from ()

    def take_over(self) -> None:
        """Note that the state is another one, which a peer or a checkpoint has given."""

    def begin(self, task: LeafTask, batch: Any) -> None:  # noqa: ANN401  of the user
        """Note the batch of a leaf, before the program can change it."""

    def end(self, task: LeafTask) -> None:
        """Note what was computed of a leaf."""

    def check(
        self,
        backend: Backend,  # noqa: ARG002
        state: State,  # noqa: ARG002
        step: int,  # noqa: ARG002
        check: Callable[[], None],  # noqa: ARG002
    ) -> Tasks[None]:
        """Compare what this rank has computed of a step that is not summed; see `meet`."""
        yield from ()

    def end_step(self) -> None:
        """Note that all turns of a step are over."""

    def is_kept(self, step: int) -> bool:  # noqa: ARG002
        """Return whether what a leaf of this step comes out as is kept beside a checkpoint."""
        return False


class Computer(ABC):
    """Sums any block of any step out of its leaves, which its caller computes, and takes steps."""

    def __init__(
        self, schedule: Schedule, schema: GradientSchema, loader: Loader, busy: BusyFlag
    ) -> None:
        """`busy` is set while a method computes, also while it waits for a leaf."""
        self.schedule: Final = schedule
        self.schema: Final = schema
        self._loader: Final = loader
        self._busy: Final = busy
        self._end: Final = schema.gradient_elements
        self._adder: Final = BlockAdder(schema, schedule.virtual_shards)
        self.means: Final = np.empty(schema.elements, np.float32)
        """Memory for the means of a step, which `update` may overwrite."""
        self.turn = 0
        """How many updates the present step has had: some take it in turns, with a sum for each."""
        self.checks = Checks()
        self.compression: Compression | None = None
        self.compressed_elements = schema.gradient_elements
        """How many elements of the summed vector, the first, a job may compress."""

    @property
    def values(self) -> bytes:
        """What belongs to the state and is no array, as the last update left it."""
        return b""

    def take_over(self, replica: "Replica") -> None:  # noqa: B027  nothing to do for most
        """Note that the replica holds a state that a peer or a checkpoint has given."""

    @property
    def elements(self) -> int:
        """The length of the summed vector: gradients, numbers, sample count, `STOP_REQUESTS`."""
        return self.schema.elements + COUNT_ELEMENTS + 1

    @abstractmethod
    def update(self, state: State, gradients: State, step: int, target: State) -> None:
        """Write the state after a step, or after one more turn of it, into `target`."""

    def undo_turns(self) -> None:  # noqa: B027  most have none
        """Go back to the beginning of the present step."""

    def sum_up(
        self,
        block: Block,
        state: State,
        step: int,
        out: Vector,
        check: Callable[[], None] = lambda: None,
        *,
        is_again: bool = False,
    ) -> Tasks[None]:
        """Fill `out` with the sum of a block, added in the order of the tree.

        `check` is called before each leaf. Raises what it raises, and `InvalidProgram`, also for a
        number that is not finite; `out` is then undefined.
        """
        with self._busy:
            loaded = self._loader.load(step, block)
            opened = _OpenBlock(block, read_only(state), step, loaded, is_again=is_again)
            try:
                yield from self._adder.add_up(
                    block, partial(self._leaf, opened, check), out[: self._end]
                )
            except BaseException:
                # `take_finished` needs the numbers and sample counts of what is finished.
                self._interrupted = opened
                raise
            yield from self._close(opened, block, out)

    def compute_again(self, leaf: Leaf, state: State) -> Tasks[LeafTask]:
        """Have a leaf computed that adds to no sum."""
        with self._busy:
            loaded = self._loader.load(leaf.step, Block(0, leaf.shard))
            task = LeafTask(leaf, read_only(state), loaded, 0, is_again=True)
            yield task
            return task

    def take_finished(self, slots: NDArray[np.float32]) -> Tasks[list[Block]]:
        """Put the sums of the finished parts of a block that `check` has ended into `slots`.

        Returns the parts. The first slot is the `out` of that block.
        """
        for (part, sums), slot in zip(self._adder.parts, slots, strict=False):
            _copy(sums, self.schema.views(slot[: self._end]))
            yield from self._close(self._interrupted, part, slot)
        return [part for part, _ in self._adder.parts]

    def _leaf(
        self, opened: _OpenBlock, check: Callable[[], None], shard: int
    ) -> Tasks[list[Vector]]:
        check()
        leaf, place = Leaf(step=opened.step, shard=shard), shard - opened.block.start
        task = LeafTask(leaf, opened.state, opened.loaded, place, is_again=opened.is_again)
        yield task
        contribution = task.take()
        arrays = self.schema.arrays(contribution, leaf)
        opened.numbers[place] = self.schema.numbers(contribution, task.weight)
        return arrays

    def _close(self, opened: _OpenBlock, part: Block, out: Vector) -> Tasks[None]:
        """Write everything but the gradients of a part, or the whole, of a block."""
        places = slice(part.start - opened.block.start, part.stop - opened.block.start)
        try:
            with np.errstate(all="ignore"):
                # One row per leaf: loss, weight, metrics, sample count.
                numbers = np.array(opened.numbers[places], np.float32)
                rows = total = np.hstack((numbers, opened.loaded.sample_counts[places]))
                while len(total) > 1:  # a whole level of the tree at once
                    total = total[0::2] + total[1::2]
        except (TypeError, ValueError, RuntimeError):
            yield from self._find_bad_leaf(opened)
            raise
        out[self._end : STOP_REQUESTS], out[STOP_REQUESTS] = total[0], 0
        if not (_is_finite(out[: self._end]) and np.isfinite(rows).all()):
            yield from self._find_bad_leaf(opened)

    def _find_bad_leaf(self, opened: _OpenBlock) -> Tasks[None]:
        """Recompute a block leaf by leaf and raise `InvalidProgram` for the first bad one.

        Returns if every leaf is fine: the sum of finite numbers can be infinite.
        """
        target = np.empty(self.schema.elements, np.float32)
        for place in range(opened.block.size):
            leaf = Leaf(step=opened.step, shard=opened.block.start + place)
            task = LeafTask(leaf, opened.state, opened.loaded, place, is_again=True)
            yield task
            self.schema.write(task.take(), task.weight, leaf, target, opened.state)


class BlockComputer(Computer):
    """Computes leaves and updates with the functions of a program."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        drawer: RandomAccess,
        state: State,
        busy: BusyFlag,
    ) -> None:
        """`state` is any state; a first leaf is computed to learn the shape of contributions."""
        self._program: Final = program
        self._rng: Final = LeafRng(schedule.seed)
        self._state_schema: Final = StateSchema.of(state)
        self._steps_per_epoch: Final = schedule.steps_per_epoch
        loader = BatchLoader(schedule, drawer, decoder_of(program))
        first = Leaf(step=0, shard=0)
        loaded = loader.load(0, Block(0, 0))
        contribution = self.contribution(LeafTask(first, read_only(state), loaded, 0))
        super().__init__(schedule, GradientSchema.of(state, contribution, first), loader, busy)

    def contribution(self, task: LeafTask) -> Contribution:
        """Return what the program computes for a leaf; raises `ProgramRaised`."""
        random = self._rng.at(task.leaf.step // self._steps_per_epoch, task.leaf)
        try:
            return self._program.gradient(task.state, task.batch, random)
        except _NOT_PROGRAM_ERRORS:
            raise
        except Exception as error:
            raise program_error("gradient", task.leaf.step, error) from error

    def run(self, tasks: Tasks[Result]) -> Result:
        """Compute every leaf on the way to a result, and return that."""
        while True:
            try:
                task = next(tasks)
            except StopIteration as end:
                result: Result = end.value
                return result
            task.contribution = self.contribution(task)

    def update(self, state: State, gradients: State, step: int, target: State) -> None:
        """Write the state after a step into `target`, or raise before anything is written."""
        with self._busy:
            try:
                returned = self._program.update(read_only(state), gradients, step)
            except _NOT_PROGRAM_ERRORS:
                raise
            except Exception as error:
                raise program_error("update", step, error) from error
            self._state_schema.write(returned, step, target)


def is_unshared(arrays: list[Vector]) -> bool:
    """True if only the holder of this list can reach any of the arrays or their memory.

    A view, a buffer export and a name that the program keeps each hold a reference to the array
    that owns the memory.
    """
    return all(
        type(array) is np.ndarray
        and sys.getrefcount(array) == _UNSHARED_REFERENCES
        and array.flags.owndata
        and array.flags.writeable
        and not getweakrefcount(array)
        for array in arrays
    )


# The list, the loop's variable and the argument of the call; measured, because versions of
# Python count them differently.
_UNSHARED_REFERENCES: Final = max(sys.getrefcount(array) for array in [np.empty(1, np.float32)])
"""Of an array that only a list holds, as `is_unshared` counts them."""


def _add(left: Arrays, right: Arrays, target: Arrays) -> None:
    for first, second, place in zip(left, right, target, strict=True):
        np.add(first, second, out=place)


def _copy(arrays: Arrays, views: Arrays) -> None:
    for array, view in zip(arrays, views, strict=True):
        np.copyto(view, array)


def _is_finite(vector: Vector) -> bool:
    """A sum of squares shows NaN and infinity; where it overflows, every element is checked."""
    return math.isfinite(np.dot(vector, vector)) or bool(np.isfinite(vector).all())
