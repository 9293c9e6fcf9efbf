"""The interface of a program for synchronous training: three pure functions and their values.

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

The runtime calls `gradient` for small parts of the global batch, on any rank, adds the
contributions in a fixed order, divides by the total weight and calls `update` on every rank. As
long as the functions depend on their arguments alone, the weights have the same bits for every
number of ranks and every history of failures. numpy is imported for type checking only, because
processes that never train import the errors below.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from muster.contracts.errors import MusterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

State: TypeAlias = "Mapping[str, NDArray[Any]]"
"""Weights and optimizer state: names to arrays, of any dtype that a checkpoint can hold."""

Gradients: TypeAlias = "Mapping[str, NDArray[np.float32]]"


class InvalidProgram(MusterError):
    """The program cannot be loaded or breaks its contract; a restart would not help.

    If the program itself raised an error, that error is the `__cause__`, with its traceback.
    """


class ProgramRaised(MusterError):
    """The program raised an error in a step, which is retried unless the same error repeats.

    The error is the `__cause__`, with its traceback.
    """

    def __init__(self, step: int, message: str, key: str = "") -> None:
        """Errors with one `key` count as the same in any step."""
        super().__init__(message)
        self.step, self.key = step, key


@dataclass(frozen=True, slots=True)
class Batch:
    """A part of the global batch; its length never changes during a job."""

    samples: Sequence[Any]
    """The result of `decode` for each line."""
    weights: "NDArray[np.float32]"
    """(samples,). A weight of 0 marks padding: a copy that fills the batch after the end of the
    data."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one batch adds. All values are weighted *sums* over the samples, never means."""

    gradients: Gradients
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Program(Protocol):
    """The functions of a program. They may not change their arguments or depend on anything else.

    A class is called without an argument, or with the directory of the data set if it takes one. An
    optional ``decode(line: bytes) -> Any`` turns a line into a sample; without it a line is JSON.
    """

    def initial(self, seed: int, /) -> State:
        """Return the initial weights and optimizer state."""

    def gradient(
        self, state: State, batch: Batch, random: "np.random.Generator", /
    ) -> Contribution:
        """Return what `batch` contributes: the same names, shapes and float32 every time.

        `random` is keyed by the step and the place of the batch in it, so a batch that is computed
        again on another rank gets the same numbers.
        """

    def update(self, state: State, gradients: Gradients, step: int, /) -> State:
        """Return the state after `step` (counted from 0), with names, shapes and dtypes unchanged.

        `gradients` are the means over the global batch, read-only.
        """


_LOADED: Final[ContextVar[str | None]] = ContextVar("the reference being loaded", default=None)


@contextmanager
def loaded_as(reference: str) -> Iterator[None]:
    """Mark the code inside as the loading of a program, where `muster.join()` is refused."""
    token = _LOADED.set(reference)
    try:
        yield
    finally:
        _LOADED.reset(token)


def refuse_while_loaded() -> None:
    """Raise `InvalidProgram` if the caller runs while a program is being loaded."""
    reference = _LOADED.get()
    if reference is not None:
        raise InvalidProgram(
            f"{reference!r} is a script, not a program: it calls muster.join() while it is "
            'imported. Submit it as "command", such as ["python", "train.py"], '
            'or call muster.join() only where __name__ is "__main__"'
        )
