"""A matrix as a product of two narrow ones: Vogels et al., "PowerSGD", 2019.

One step of a power iteration a time, which begins with the result Q of the step before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

import numpy as np

from muster.collectives.compression.kind import Kind, Message, Vector, joined, split
from muster.collectives.errors import Unsupported

_TINY: Final = np.float32(1e-6)
"""What is left of a column, as a share of it, that the ones before it explain up to rounding."""


@dataclass
class PowerSGD(Kind):
    """P·Qᵀ of a rank for a matrix (rows, …), whose further axes count as one."""

    rank: int = 2
    q: Vector | None = field(default=None, init=False, repr=False, compare=False)
    """(columns, rank), the sum over all ranks of the last step."""

    def __post_init__(self) -> None:
        if not (isinstance(self.rank, int) and self.rank > 0):
            raise Unsupported(f"PowerSGD has no rank {self.rank}: use 1 or more")

    def saves(self, shape: Sequence[int]) -> bool:
        """Return whether the factors of a matrix are smaller than the matrix."""
        return self.rank * (shape[0] + prod(shape[1:])) < prod(shape)

    def project(self, array: Vector) -> Vector:
        """Return P = M·Q, (rows, rank), of this rank."""
        matrix = matrix_of(array)
        if self.rank > min(matrix.shape):
            sides = "{} x {}".format(*matrix.shape)
            raise Unsupported(f"a matrix of {sides} has no rank {self.rank}: send it whole")
        q = self.q
        # A column that is zero, or NaN, would stay so.
        if q is None or not 0 < np.abs(q).max(axis=0).min() < np.inf:
            normal = np.random.default_rng(0).standard_normal
            q = normal((matrix.shape[1], self.rank), np.float32)
        product: Vector = matrix @ q
        return product

    def encode_body(self, array: Vector, room: int = 0) -> Message:
        p = orthogonal(self.project(array))
        self.q = matrix_of(array).T @ p
        return joined(room, p, self.q)

    def add_body(self, body: Message, out: Vector, factor: float) -> None:
        matrix = matrix_of(out)
        parts = split(body, *((np.float32, side * self.rank) for side in matrix.shape))
        p, q = (part.reshape(-1, self.rank) for part in parts)
        matrix += p @ q.T * np.float32(factor)


def matrix_of(array: Vector) -> Vector:
    """Return (rows, …) with the further axes as one."""
    return array.reshape(len(array), -1)


def orthogonal(p: Vector) -> Vector:
    """Return columns that are orthogonal and of length 1, or zero, in their order (Gram-Schmidt).

    Always in the same order, so that all ranks get the same bits.
    """
    columns = p.T.copy()
    for number in range(len(columns)):
        column = columns[number]
        length = np.linalg.norm(column)
        for other in columns[:number]:
            column -= (other @ column) * other
        left = np.linalg.norm(column)
        column *= 1 / left if left > _TINY * length else 0
    return columns.T.copy()
