"""The interface that is committed is the one that is served."""

import re
from pathlib import Path
from typing import Any

import pytest

from api.openapi import document, text

COMMITTED = Path(__file__).parents[3] / "docs" / "openapi.json"

OPERATIONS = [
    (f"{method.upper()} {path}", operation)
    for path, methods in document()["paths"].items()
    for method, operation in methods.items()
]


def test_the_committed_document_is_that_of_this_version() -> None:
    assert COMMITTED.read_text() == text(), (
        "the interface has changed: look at the difference, and write it down with "
        "`python -m api.openapi > docs/openapi.json`"
    )


def test_no_two_operations_are_called_the_same() -> None:
    called = [operation["operationId"] for _, operation in OPERATIONS]
    assert sorted(called) == sorted(set(called))
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in called)


@pytest.mark.parametrize(("name", "operation"), OPERATIONS)
def test_each_operation_says_what_it_is_and_how_it_refuses(
    name: str, operation: dict[str, Any]
) -> None:
    assert operation["summary"]
    assert operation["tags"]
    refusals = {
        status: list(response["content"])
        for status, response in operation["responses"].items()
        if status[0] in "45" and not status.endswith("XX")
    }
    assert set(map(tuple, refusals.values())) <= {("application/problem+json",)}
    assert refusals.keys() >= ({"404"} if "{" in name else set())
    assert refusals.keys() >= ({"422"} if operation.get("parameters") else set())
