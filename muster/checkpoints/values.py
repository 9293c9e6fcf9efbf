"""The values of a state as JSON, without loss.

None, bools, ints of any size, finite floats, strings, lists and dicts with string keys are
themselves. JSON has no NaN and no tuple, yet a first ``best_loss = inf`` and ``random.getstate()``
are in many a training script, so those are written as an object with one reserved key:
``{"__float__": "inf"}`` and ``{"__tuple__": [...]}``. Anything else is refused, never guessed.
"""

import math
from typing import Any, Final

from muster.checkpoints.errors import UnsupportedState

FLOAT: Final = "__float__"
TUPLE: Final = "__tuple__"


def to_json(value: object, where: str) -> Any:  # noqa: ANN401  JSON is anything
    """Return the JSON form of `value`; raises `UnsupportedState` naming the place `where`."""
    try:
        return _to_json(value, where)
    except RecursionError as error:
        raise UnsupportedState(f"{where} is nested too deeply, or contains itself") from error


def from_json(value: Any) -> Any:  # noqa: ANN401  JSON is anything
    """Return the value whose JSON form this is."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {FLOAT}:
            return float(value[FLOAT])
        if value.keys() == {TUPLE}:
            return tuple(from_json(item) for item in value[TUPLE])
        return {key: from_json(item) for key, item in value.items()}
    return value


def _to_json(value: object, where: str) -> Any:  # noqa: ANN401  JSON is anything
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {FLOAT: repr(float(value))}
    if isinstance(value, list):
        return [_to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {TUPLE: _to_json(list(value), where)}
    if isinstance(value, dict):
        return {
            _key(key, where): _to_json(item, f'{where}["{key}"]') for key, item in value.items()
        }
    raise UnsupportedState(
        f"{where} is of the type {type(value).__name__}, which a checkpoint cannot hold: use numpy "
        "arrays at the top level of the state, and None, bool, int, float, str, list, tuple or "
        "dict elsewhere"
    )


def _key(key: object, where: str) -> str:
    if not isinstance(key, str) or key in (FLOAT, TUPLE):
        raise UnsupportedState(
            f"{where} has the key {key!r}: keys must be strings, and not {FLOAT} or {TUPLE}"
        )
    return key
