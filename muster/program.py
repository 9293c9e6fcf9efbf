"""What a person writes to be trained synchronously: three pure functions, and the values they take.

    class Regression:
        def initial(self, seed):
            return {"weights": np.zeros(8, np.float32)}

        def gradient(self, state, batch, random):
            inputs = np.array([sample["x"] for sample in batch.samples], np.float32)
            wanted = np.array([sample["y"] for sample in batch.samples], np.float32)
            errors = (inputs @ state["weights"] - wanted) * batch.weights
            return Contribution({"weights": inputs.T @ errors}, loss=float(errors @ errors) / 2)

        def update(self, state, gradients, step):
            return {"weights": state["weights"] - np.float32(0.1) * gradients["weights"]}

The runtime does everything else. It calls `gradient` for small parts of the global batch, on
whatever rank, adds the contributions up in an order that never changes, divides by the total weight
and calls `update` on every rank. As long as the functions depend on their arguments alone, the
weights have the same bits for every number of ranks and whatever failed meanwhile. numpy is named
here and not imported: who only asks what went wrong does not pay for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import msgspec

from muster.contracts.errors import MusterError
from muster.datasets.errors import InvalidSample
from muster.datasets.lines import Line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

State: TypeAlias = "Mapping[str, NDArray[Any]]"
"""Weights and optimizer state: names to arrays, of any dtype that a checkpoint can hold."""

Gradients: TypeAlias = "Mapping[str, NDArray[np.float32]]"


class InvalidProgram(MusterError):
    """The program cannot be loaded, or does not keep to what it promised: its author's to mend.

    Where the program itself raised an error, that is the `__cause__`, with its traceback.
    """


class ProgramRaised(MusterError):
    """The program raised an error in a step: an accident, unless the same comes again.

    The error is the `__cause__`, with its traceback.
    """

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of the global batch; its length never changes during a job."""

    samples: Sequence[Any]
    """What `decode` made of each line."""
    weights: "NDArray[np.float32]"
    """(samples,), one weight each. It is 0 where the data ended before the batch was full: such a
    sample is a copy that only fills the place."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one batch adds. All of it *sums* over the samples times their weights, never means."""

    gradients: Gradients
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Program(Protocol):
    """What is called. None may change its arguments or look at anything but them.

    A class is called without an argument, or with the directory of the data set if it takes one. It
    may also have a function ``decode(line: bytes) -> Any``; without it a line is JSON.
    """

    def initial(self, seed: int, /) -> State:
        """Return weights and optimizer state to begin with."""

    def gradient(
        self, state: State, batch: Batch, random: "np.random.Generator", /
    ) -> Contribution:
        """Return what `batch` contributes: the same names, shapes and float32 every time.

        `random` is seeded with the step and the place of the batch in it: a batch that is computed
        again, elsewhere, meets the same numbers.
        """

    def update(self, state: State, gradients: Gradients, step: int, /) -> State:
        """Return the state after `step` (counted from 0), with names, shapes and dtypes unchanged.

        `gradients` are the means over the global batch; they cannot be written to.
        """


def decoder_of(program: Program) -> Callable[[bytes], Any]:
    """Return what makes a sample of a line: the program's own `decode`, or JSON."""
    decode: Callable[[bytes], Any] = getattr(program, "decode", msgspec.json.decode)
    return decode


def decoded(lines: Iterable[Line], decode: Callable[[bytes], Any]) -> list[Any]:
    """Return the samples that `lines` hold, or raise `InvalidSample` for the first bad one."""
    samples = []
    for line in lines:
        try:
            samples.append(decode(line.content))
        except Exception as error:
            problem = f"no sample, {type(error).__name__}: {error}"
            raise InvalidSample(line.shard, line.number, problem, line.content) from error
    return samples


_LOADED: Final[ContextVar[str | None]] = ContextVar("the reference being loaded", default=None)


@contextmanager
def loaded_as(reference: str) -> Iterator[None]:
    """Mark what runs inside as the loading of a program: what trains by itself is refused there."""
    token = _LOADED.set(reference)
    try:
        yield
    finally:
        _LOADED.reset(token)


def refuse_while_loaded() -> None:
    """Raise `InvalidProgram` if the caller is part of the loading of a program."""
    reference = _LOADED.get()
    if reference is not None:
        raise InvalidProgram(
            f"{reference!r} is no program but a script: it calls muster.join() as soon as it is "
            'loaded, to train by itself. Submit it as "command", such as ["python", "train.py"], '
            'or call muster.join() only where __name__ is "__main__"'
        )
