"""Request bodies, and the committed documents that describe the interface."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from api.errors import InvalidRequest
from api.schema import ERRORS_LIMIT, StopBody, TokenRequest, decode
from api.server import create_app
from cli.main import job_schema
from docs import generate
from muster.contracts.job.spec import JobRequest, JobSpec
from muster.contracts.token import Scope

DOCS = Path(__file__).parents[3] / "docs"

OPERATIONS = [
    (f"{method.upper()} {path}", operation)
    for path, methods in create_app().openapi()["paths"].items()
    for method, operation in methods.items()
]


def test_valid_bodies_are_decoded() -> None:
    assert decode({"heartbeat_timeout": 3}, JobRequest).heartbeat_timeout == 3.0
    assert decode({"command": ["true"], "mode": None}, JobRequest).spec() == JobSpec(
        command=("true",), mode="independent"
    )
    assert decode({}, StopBody) == StopBody(grace_seconds=None, reason=None)
    assert decode({"name": "ci", "scope": "admin"}, TokenRequest).scope is Scope.ADMIN


def test_a_refusal_names_a_limited_number_of_fields() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decode({f"epochs{number}": 0 for number in range(30_000)}, JobRequest)
    assert [bool(error.hint) for error in refusal.value.errors] == [True] * ERRORS_LIMIT


def test_a_request_has_the_fields_of_a_job_and_an_id() -> None:
    assert set(JobRequest.__struct_fields__) == {"job_id", *JobSpec.__struct_fields__}
    assert JobRequest().spec() == JobSpec(mode="synchronous")
    assert JobRequest.__doc__ is not None
    assert "relative to the directory in which the server was started" in JobRequest.__doc__


@pytest.mark.parametrize("name", generate.PAGES)
def test_generated_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == generate.PAGES[name](), "run: python -P docs/generate.py"


def test_every_field_of_a_job_is_documented() -> None:
    properties = job_schema()["properties"]
    assert properties.keys() == set(JobRequest.__struct_fields__)
    assert all("description" in str(field) for field in properties.values())


def test_every_reference_and_body_of_the_document_has_a_schema() -> None:
    document = create_app().openapi()
    schemas = document["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", str(document))) <= schemas.keys()
    bodies = [operation["requestBody"] for _, operation in OPERATIONS if "requestBody" in operation]
    for body in bodies:
        name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert schemas[name]["examples"]


def test_no_two_operations_have_the_same_name() -> None:
    names = Counter(operation["operationId"] for _, operation in OPERATIONS)
    assert max(names.values()) == 1
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", name) for name in names)


@pytest.mark.parametrize(("name", "operation"), OPERATIONS)
def test_each_operation_describes_itself_and_its_refusals(
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
