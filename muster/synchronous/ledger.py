"""Whole passes as an array: a row each, however many there are.

What a checkpoint says in words has a limit, what it holds in arrays has none.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from muster.contracts.messages import EpochDone

COLUMNS: Final = EpochDone.__struct_fields__
"""Whole numbers from 0 on, each below 2^64."""


def rows_of(epochs: Sequence[EpochDone]) -> NDArray[np.uint64]:
    """Return (passes, columns) numbers."""
    rows = [msgspec.structs.astuple(epoch) for epoch in epochs]
    return np.array(rows, np.uint64).reshape(-1, len(COLUMNS))


def epochs_of(rows: NDArray[Any]) -> tuple[EpochDone, ...]:
    """Return the passes that `rows_of` made these rows of."""
    return tuple(EpochDone(**dict(zip(COLUMNS, row, strict=True))) for row in rows.tolist())
