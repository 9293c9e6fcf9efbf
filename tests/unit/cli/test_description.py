"""What is typed goes before the file, and paths are those of whoever types."""

from pathlib import Path
from typing import Any

import pytest

from cli.description import Description
from cli.job_file import JobFile, Spot
from muster.client.errors import FieldError

HERE = Path("/home/me")


def described(
    fields: dict[str, Any] | None = None, env: dict[str, str] | None = None, **typed: object
) -> Description:
    marks = {(field,): Spot(line, 1, None) for line, field in enumerate(fields or {}, start=1)}
    file = None if fields is None else JobFile(name="job.yaml", fields=fields, marks=marks)
    return Description(file=file, typed=typed, mappings={"env": env or {}})


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (described(), {}),
        (described({"seed": 1, "epochs": 2}, seed=3), {"seed": 3, "epochs": 2}),
        (described({"max_workers": 4}, max_workers=None), {"max_workers": None}),
        (described({"env": {"A": "a", "B": "b"}}, {"B": "c"}), {"env": {"A": "a", "B": "c"}}),
        (described({"env": None}, {"B": "c"}), {"env": {"B": "c"}}),
        (described({"env": ["A=1"]}, {"B": "c"}), {"env": ["A=1"]}),
        (described(dataset_dir="a/../b"), {"dataset_dir": "/home/me/b"}),
        (described({"checkpoint_dir": "/saved"}), {"checkpoint_dir": "/saved"}),
        (described(dataset_dir=7), {"dataset_dir": 7}),
        (described(command=["a"]), {"command": ["a"], "working_dir": "/home/me"}),
        (described(program="a.py:B"), {"program": "a.py:B", "working_dir": "/home/me"}),
        (
            described({"working_dir": "x"}, command=["a"]),
            {"command": ["a"], "working_dir": "/home/me/x"},
        ),
    ],
)
def test_a_description_means_the_same_wherever_it_is_read(
    said: Description, body: dict[str, Any]
) -> None:
    assert said.body(HERE) == body


def test_secrets_that_are_typed_are_added_to_those_of_the_file() -> None:
    fields = {"secrets": {"A": "file:a", "B": "file:b"}}
    file = JobFile(name="job.yaml", fields=fields, marks={})
    said = Description(file=file, typed={}, mappings={"env": {}, "secrets": {"B": "env:B"}})
    assert said.body(HERE) == {"secrets": {"A": "file:a", "B": "env:B"}}


@pytest.mark.parametrize(
    ("loc", "line"),
    [
        (("body", "epochs"), "job.yaml:2:1: epochs: not so (did you mean 'x'?)"),
        (("body", "epochs", 3), "job.yaml:2:1: epochs.3: not so (did you mean 'x'?)"),
        (("body", "seed"), "muster: seed: not so (did you mean 'x'?)"),
        (("body", "name"), "muster: name: not so (did you mean 'x'?)"),
        (("body",), "muster: body: not so (did you mean 'x'?)"),
    ],
    ids=["of the file", "within a field of it", "of both", "of neither", "of the whole"],
)
def test_what_is_wrong_is_told_where_it_was_said(loc: tuple[str | int, ...], line: str) -> None:
    said = described({"seed": 1, "epochs": 2}, seed=3)
    wrong = FieldError(loc=loc, msg="not so", type="t", hint="did you mean 'x'?")
    assert list(said.sentences([wrong])) == [line]


def test_what_is_wrong_with_a_file_is_told_from_top_to_bottom() -> None:
    said = described({"seed": 1, "epochs": 2}, name=3)
    wrong = [
        FieldError(loc=("body", name), msg="no", type="t") for name in ("name", "epochs", "seed")
    ]
    assert [line.split(": ")[1] for line in said.sentences(wrong)] == ["seed", "epochs", "name"]


def test_of_a_field_that_nobody_knows_it_is_said_who_lists_them() -> None:
    wrong = FieldError(loc=("body", "foo"), msg="there is no such field", type="extra_forbidden")
    assert list(described(foo=1).sentences([wrong])) == [
        "muster: foo: there is no such field (muster schema lists them)"
    ]
