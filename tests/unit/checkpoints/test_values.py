import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoints.values import from_json, to_json

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def round_trip(value: object) -> Any:  # noqa: ANN401  whatever went in
    return from_json(msgspec.json.decode(msgspec.json.encode(to_json(value, "v"))))


def exactly(value: object) -> str:
    # repr tells 1 from 1.0 and True, a tuple from a list, -0.0 from 0.0, and equals itself for NaN.
    return repr(value)


@pytest.mark.slow
@settings(derandomize=True, max_examples=120, deadline=None)
@given(VALUES)
def test_values_come_back_exactly(value: object) -> None:
    assert exactly(round_trip(value)) == exactly(value)


def test_random_states_come_back() -> None:
    generator = random.Random(3)  # noqa: S311  no secret
    kept = round_trip(generator.getstate())
    expected = generator.random()
    generator.setstate(kept)
    assert generator.random() == expected
    assert round_trip({"state": 2**127 + 5}) == {"state": 2**127 + 5}


def test_what_json_has_no_word_for_has_one_here() -> None:
    assert round_trip([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert math.isnan(round_trip(math.nan))
    assert to_json((1, math.nan), "v") == {"__tuple__": [1, {"__float__": "nan"}]}
