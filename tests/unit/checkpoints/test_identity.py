import numpy as np
import pytest
from vaults import Rank, owner, position, state

from muster.checkpoints.identity import identity, identity_of
from muster.contracts.position import Position

BASE = {"w": np.arange(6, dtype=np.float32), "lr": 0.1, "epochs": [1, 2]}
CHANGES = {
    "a bit": {"w": np.nextafter(BASE["w"], 9)},
    "the shape": {"w": BASE["w"].reshape(2, 3)},
    "the dtype": {"w": BASE["w"].view(np.int32)},
    "a value": {"lr": 0.2},
    "a type": {"epochs": [1, 2.0]},
    "a name": {"lr": None, "rate": 0.1},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_any_difference_shows(change: dict[str, object]) -> None:
    assert identity({**BASE, **change}, Position()) != identity(BASE, Position())


def test_the_position_belongs_to_it() -> None:
    assert identity(BASE, Position(step=1)) != identity(BASE, Position())


def test_order_and_layout_in_memory_do_not_matter() -> None:
    matrix = np.arange(6.0).reshape(2, 3)
    one = {"a": matrix, "b": {"x": 1, "y": 2}}
    other = {"b": {"y": 2, "x": 1}, "a": np.asfortranarray(matrix)}
    assert identity(one, Position()) == identity(other, Position())


def test_the_generation_does_not_matter() -> None:
    ranks = [Rank(owner=owner(generation=generation)) for generation in (0, 5)]
    for rank in ranks:
        rank.vault.save(3, position(3), state(0, 3))
    first, second = (rank.vault.restore() for rank in ranks)
    assert identity_of(first) == identity_of(second) == identity(state(0, 3), position(3))
