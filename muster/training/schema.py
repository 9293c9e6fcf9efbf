"""Names, shapes and dtypes of a program's arrays, fixed once and checked on everything it returns.

Every number that is summed over the global batch lies in one flat float32 vector: the gradients in
the order of their names, then the loss, the total weight and the metrics. All of it goes through
the same tree, so none of it depends on which rank computed what:

    gradient "a" · gradient "b" · … · loss · weight · metric "a" · metric "b" · …
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.checkpoints.format import DTYPES
from muster.contracts.messages.rank import METRIC_NAME_LIMIT, METRICS_LIMIT
from muster.program import Contribution, InvalidProgram, State

Vector: TypeAlias = NDArray[np.float32]

_FLOAT32: Final = np.dtype(np.float32)


class Leaf(NamedTuple):
    """One virtual shard of one step."""

    step: int
    shard: int

    def __str__(self) -> str:
        return f"in step {self.step}, virtual shard {self.shard}"


class Part(NamedTuple):
    """The place of one gradient in the vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """Means over a global batch, per unit of weight. The gradients are read-only."""

    gradients: Mapping[str, Vector]
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSchema:
    """The flat layout of contributions."""

    parts: tuple[Part, ...]
    metrics: tuple[str, ...]

    @classmethod
    def of(cls, state: State, contribution: Contribution, leaf: Leaf) -> "GradientSchema":
        """Return the layout of a first contribution; raises `InvalidProgram`.

        A gradient with the name of an array of the state must have the shape of that array.
        """
        _check_contribution(contribution, leaf)
        parts: list[Part] = []
        start = 0
        for name in _sorted(contribution.gradients, f"the gradients {leaf}"):
            found = contribution.gradients[name]
            shape = np.shape(state.get(name, found))
            _check_gradient(name, found, shape, leaf)
            parts.append(Part(name, shape, start))
            start = parts[-1].stop
        metrics = _sorted(contribution.metrics, f"the metrics {leaf}")
        longest = max(map(len, metrics), default=0)
        if len(metrics) > METRICS_LIMIT or longest > METRIC_NAME_LIMIT:
            raise InvalidProgram(
                f"there are {len(metrics)} metrics {leaf}, the longest name of {longest} "
                f"characters: at most {METRICS_LIMIT} of up to {METRIC_NAME_LIMIT} characters fit "
                "into a heartbeat, so leave some out or write them to the log"
            )
        return cls(parts=tuple(parts), metrics=tuple(metrics))

    @property
    def gradient_elements(self) -> int:
        """The length of the gradients alone."""
        return self.parts[-1].stop if self.parts else 0

    @property
    def elements(self) -> int:
        """The length of the whole vector."""
        return self.gradient_elements + 2 + len(self.metrics)

    def write(
        self, contribution: Contribution, weight: float, leaf: Leaf, target: Vector, state: State
    ) -> None:
        """Fill `target` with a contribution, made of `state`, and the sum of its samples' weights.

        Raises `InvalidProgram` for names, shapes or dtypes other than at first, and for a number
        that is not finite; `target` is then undefined.
        """
        for part, found in zip(self.parts, self._checked(contribution, leaf), strict=True):
            target[part.start : part.stop] = found.reshape(-1)
        numbers = (contribution.loss, weight, *(contribution.metrics[m] for m in self.metrics))
        try:
            with np.errstate(over="ignore"):  # `_refuse` reports it
                target[self.gradient_elements :] = numbers
        except (TypeError, ValueError, RuntimeError) as error:  # torch raises the last
            raise InvalidProgram(f"the loss or a metric {leaf} is not a number: {error}") from error
        if not np.isfinite(target).all():
            self._refuse(target, leaf, _blame(state, leaf.step))

    def arrays(self, contribution: Contribution, leaf: Leaf) -> list[Vector]:
        """Return the gradients in their order, uncopied; raises `InvalidProgram` as `write` does.

        Does not check that they are finite.
        """
        found = self._fitting(contribution)
        return self._checked(contribution, leaf) if found is None else found

    def numbers(self, contribution: Contribution, weight: float) -> tuple[float, ...]:
        """Return the numbers that `write` puts after the gradients."""
        metrics = contribution.metrics
        return (contribution.loss, weight, *(metrics[name] for name in self.metrics))

    def views(self, vector: Vector) -> list[Vector]:
        """Return views of the gradients in a vector, in their order and shapes."""
        return [vector[part.start : part.stop].reshape(part.shape) for part in self.parts]

    def means(self, total: Vector, target: Vector) -> Means:
        """Divide a global batch's `total` by its weight into `target`; return views of it.

        One division per element gives the same bits on every rank.
        """
        end = self.gradient_elements
        with np.errstate(invalid="ignore"):  # no weight at all: the computer refuses the step
            np.divide(total, total[end + 1], out=target)
        names = (part.name for part in self.parts)
        return Means(
            gradients=read_only(dict(zip(names, self.views(target), strict=True))),
            loss=float(target[end]),
            metrics=dict(zip(self.metrics, target[end + 2 :].tolist(), strict=True)),
        )

    def _checked(self, contribution: Contribution, leaf: Leaf) -> list[Vector]:
        _check_contribution(contribution, leaf)
        expected = [part.name for part in self.parts]
        _check_same(expected, contribution.gradients, f"the gradients {leaf}")
        _check_same(self.metrics, contribution.metrics, f"the metrics {leaf}")
        for part in self.parts:
            _check_gradient(part.name, contribution.gradients[part.name], part.shape, leaf)
        return [contribution.gradients[part.name] for part in self.parts]

    def _fitting(self, contribution: object) -> list[Vector] | None:
        """Return the gradients if names, shapes and dtypes match exactly, else None.

        The fast path, once per leaf: the program has just evicted everything else from the cache,
        so this touches as little memory as possible.
        """
        if type(contribution) is not Contribution:
            return None
        gradients, metrics = contribution.gradients, contribution.metrics
        if type(gradients) is not dict or len(gradients) != len(self.parts):
            return None
        if type(metrics) is not dict or len(metrics) != len(self.metrics):
            return None
        found: list[Vector] = []
        for name, shape, _ in self.parts:
            array = gradients.get(name)
            if type(array) is not np.ndarray or array.shape != shape or array.dtype != _FLOAT32:
                return None
            if not array.flags.c_contiguous:
                return None
            found.append(array)
        return found if all(name in metrics for name in self.metrics) else None

    def _refuse(self, written: Vector, leaf: Leaf, cause: str) -> None:
        """Raise `InvalidProgram` for the first number that is not finite."""
        for part in self.parts:
            if not np.isfinite(written[part.start : part.stop]).all():
                raise InvalidProgram(
                    f"the gradient {part.name!r} {leaf} holds a number that is not finite: "
                    f"{cause}, or take a smaller learning rate"
                )
        names = ("loss", "total weight", *(f"metric {name!r}" for name in self.metrics))
        numbers = zip(names, written[self.gradient_elements :].tolist(), strict=True)
        name, value = next(named for named in numbers if not np.isfinite(named[1]))
        raise InvalidProgram(
            f"the {name} {leaf} is {value} in float32: {cause}, or take a smaller learning rate"
        )


@dataclass(frozen=True, slots=True)
class StateSchema:
    """Name, shape and dtype of every array of a state, constant during a job."""

    arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]

    @classmethod
    def of(cls, state: State) -> "StateSchema":
        """Return the schema of an initial state; raises `InvalidProgram`."""
        arrays = {}
        for name in _sorted(state, "the state that initial() returned"):
            array = state[name]
            # Not a subclass such as a masked array: a checkpoint would lose the mask.
            if type(array) is not np.ndarray or array.dtype.str not in DTYPES:
                raise InvalidProgram(
                    f"{name!r} of the state that initial() returned is {_described(array)}: make "
                    "it a numpy array of little-endian bool, int or float of 16 to 64 bits"
                )
            arrays[name] = (array.shape, array.dtype)
        return cls(arrays)

    def write(self, state: State, step: int, target: State) -> None:
        """Copy the state that update() returned for `step` into `target`.

        Raises `InvalidProgram` before anything is written.
        """
        where = f"the state that update() returned for step {step}"
        _check_same(self.arrays, state, where)
        for name, (shape, dtype) in self.arrays.items():
            array = state[name]
            kinds = (np.ndarray, dtype.type)  # numpy makes scalars of arrays without dimensions
            if type(array) not in kinds or array.shape != shape or array.dtype != dtype:
                raise InvalidProgram(
                    f"{name!r} of {where} is {_described(array)}: expected an array of "
                    f"{dtype} {_dimensions(shape)}, as in the state it was given"
                )
        for name in self.arrays:
            target[name][...] = state[name]


def read_only(arrays: State) -> dict[str, NDArray[Any]]:
    """Return read-only views of `arrays`."""
    # Views of the same memory, which they keep alive; `arrays` stay writable.
    views = {name: array.view() for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def _blame(state: State, step: int) -> str:
    """Return where to look for the first number that is not finite."""
    for name, array in state.items():
        if not np.isfinite(array).all():
            made_by = f"update() returned for step {step - 1}" if step else "training begins with"
            return f"{name!r} of the state that {made_by} holds one already, so look there"
    return "look at the data of that step"


def _check_contribution(found: object, leaf: Leaf) -> None:
    if not isinstance(found, Contribution):
        raise InvalidProgram(
            f"what gradient() returned {leaf} is {_described(found)}: expected a Contribution"
        )


def _check_gradient(name: str, found: object, shape: tuple[int, ...], leaf: Leaf) -> None:
    right = isinstance(found, np.ndarray) and found.dtype == _FLOAT32 and found.shape == shape
    if not right:
        raise InvalidProgram(
            f"the gradient {name!r} {leaf} is {_described(found)}: expected an array of float32 "
            f"{_dimensions(shape)}"
        )
    if isinstance(found, np.ndarray) and not found.flags.c_contiguous:
        raise InvalidProgram(
            f"the gradient {name!r} {leaf} is not contiguous: expected one in C order, as "
            "np.ascontiguousarray() makes it"
        )


def _check_same(expected: Iterable[str], found: object, subject: str) -> None:
    if not isinstance(found, Mapping):
        raise InvalidProgram(f"{subject}: expected a mapping with names, got {_described(found)}")
    if found.keys() != set(expected):
        raise InvalidProgram(
            f"{subject}: expected {_listed(expected)}, the same every time, got {_listed(found)}"
        )


def _sorted(found: object, subject: str) -> list[str]:
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise InvalidProgram(f"{subject}: expected a mapping with names, got {_described(found)}")
    # Dictionaries of two ranks may differ in order, and the vector must not.
    return sorted(found)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(map(repr, names))) or "nothing"


def _described(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} {_dimensions(value.shape)}"
    hint = " (call .numpy() on it)" if hasattr(value, "numpy") else ""  # a tensor
    return f"a {type(value).__name__}{hint}"


def _dimensions(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "without dimensions"


def bytes_of(array: NDArray[Any]) -> memoryview:
    """Return the bytes of an array, of a copy if it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
