"""A field that is wrong is told in the words of whoever wrote it."""

from typing import Any

import pytest
from pydantic import ValidationError

from api.field_words import field_words
from api.requests import JobRequest


def refused(body: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as error:
        JobRequest.model_validate(body)
    return [field_words(dict(found)) for found in error.value.errors()]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("wrold_size", 4, "there is no such field"),
        ("epochs", "many", "'many' is no whole number"),
        ("epochs", 1.5, "1.5 is no whole number"),
        ("epochs", True, "true is no whole number"),
        ("epochs", None, "null is no whole number"),
        ("epochs", 0, "0 is less than 1"),
        ("sleep_sec", "long", "'long' is no number"),
        ("env", {"LR": 0.1}, '0.1 is no text: write "0.1"'),
        ("env", {"ON": True}, 'true is no text: write "true"'),
        ("env", {"AT": ["x"]}, "this value is no text"),
        ("env", ["A=1"], "this value is no mapping: write NAME: VALUE"),
        ("secrets", {"KEY": 4711}, "this value is no text"),
        ("command", "python train.py", "'python train.py' is no list"),
        ("restart_scope", "all", "'all' is not 'rank' or 'gang'"),
        (
            "job_id",
            "a b",
            "use 1 to 63 letters, digits, '-' or '_', starting with a letter or digit",
        ),
        ("epochs", "\ud800", "'\\ud800' is no whole number"),
        ("epochs", "x" * 100, "this value is no whole number"),
    ],
)
def test_what_is_wrong_is_said_in_plain_words(field: str, value: object, said: str) -> None:
    assert refused({field: value}) == [said]
