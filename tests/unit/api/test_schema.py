"""Request bodies, and the committed documents that describe the interface."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.app import described
from api.errors import InvalidRequest
from api.schema import JobPatch, StopBody, TokenRequest, decode
from cli.main import job_schema
from docs import generate
from muster.contracts.spec import JobRequest, JobSpec
from muster.contracts.token import Scope

DOCS = Path(__file__).parents[3] / "docs"

OPERATIONS = [
    (f"{method.upper()} {path}", operation)
    for path, methods in described("0").openapi()["paths"].items()
    for method, operation in methods.items()
]


def errors(sent: object, kind: type[msgspec.Struct] = JobRequest) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as refused:
        decode(sent, kind)
    found = refused.value.errors
    return [(".".join(map(str, error.loc[1:])), error.msg) for error in found]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("wrold_size", 4, "there is no such field"),
        ("epochs", "many", "expected an integer, got 'many'"),
        ("epochs", 1.5, "expected an integer, got 1.5"),
        ("epochs", True, "expected an integer, got true"),
        ("epochs", None, "expected an integer, got null"),
        ("epochs", 0, "0 is not between 1 and 1000000"),
        ("max_workers", 10**30, f"{10**30} is not between 1 and 4096"),
        ("epochs", "\ud800", "expected an integer, got '\\ud800'"),
        ("epochs", "x" * 100, "expected an integer, got this value"),
        ("sleep_sec", "long", "expected a number, got 'long'"),
        ("sleep_sec", float("nan"), "NaN is not between 0 and 3600"),
        ("sleep_sec", float("inf"), "Infinity is not between 0 and 3600"),
        ("name", 7, 'expected text, got 7: write "7"'),
        ("env", ["A=1"], "expected a mapping NAME: VALUE, got this value"),
        ("restart_scope", "all", "expected gang or rank, got 'all'"),
        ("job_id", "a b", "use 1 to 63 letters, digits, '-' or '_', starting with a letter"),
        ("job_id", "a\n", "use 1 to 63 letters, digits, '-' or '_', starting with a letter"),
    ],
)
def test_a_wrong_field_is_explained(field: str, value: object, said: str) -> None:
    ((where, message),) = errors({field: value})
    assert where == field
    assert message.startswith(said)


@pytest.mark.parametrize(
    ("sent", "where", "said"),
    [
        ({"env": {"LR": 0.1}}, "env.LR", 'expected text, got 0.1: write "0.1"'),
        ({"env": {"AT": ["x"]}}, "env.AT", "expected text, got this value"),
        ({"secrets": {"KEY": 4711}}, "secrets.KEY", "expected text, got this value"),
        ({"command": ["python", 3]}, "command.1", 'expected text, got 3: write "3"'),
        ({"labels": {"\ud800": "x"}}, "labels.?", "holds half of a surrogate pair"),
    ],
)
def test_an_error_names_the_entry_of_a_mapping_or_list(sent: object, where: str, said: str) -> None:
    ((found, message),) = errors(sent)
    assert found == where
    assert message.startswith(said)


def test_a_command_in_one_string_shows_how_to_write_it() -> None:
    ((_, message),) = errors({"command": "python train.py"})
    assert 'a list of words, such as ["python", "train.py"]' in message
    assert message.endswith("got 'python train.py'")


def test_all_wrong_fields_are_reported_at_once() -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode({"wrold_size": 4, "epochs": "x", "env": {"A": 1, "B": 2}, "name": "ok"}, JobRequest)
    assert [error.loc for error in refused.value.errors] == [
        ("body", "wrold_size"),
        ("body", "epochs"),
        ("body", "env", "A"),
        ("body", "env", "B"),
    ]
    assert refused.value.errors[0].hint == "did you mean 'world_size'?"


@pytest.mark.parametrize("sent", [None, [], 4, "x"])
def test_a_body_must_be_an_object(sent: object) -> None:
    assert errors(sent) == [("", "expected a JSON object")]


@pytest.mark.parametrize(
    ("kind", "sent", "where"),
    [
        (JobPatch, {}, "world_size"),
        (JobPatch, {"world_size": 4097}, "world_size"),
        (StopBody, {"grace_seconds": -1}, "grace_seconds"),
        (StopBody, {"reason": "two\nlines"}, "reason"),
        (StopBody, {"reason": "a line\n"}, "reason"),
        (StopBody, {"reason": "\ud800"}, "reason"),
        (StopBody, {"reason": "x" * 501}, "reason"),
        (TokenRequest, {"scope": "read"}, "name"),
        (TokenRequest, {"name": "ci\n"}, "name"),
        (TokenRequest, {"name": "ci", "scope": "root"}, "scope"),
        (TokenRequest, {"name": "ci", "expires_in_seconds": 0}, "expires_in_seconds"),
    ],
)
def test_other_bodies_refuse_wrong_fields(
    kind: type[msgspec.Struct], sent: object, where: str
) -> None:
    assert [found for found, _ in errors(sent, kind)] == [where]


def test_valid_bodies_are_decoded() -> None:
    assert decode({"heartbeat_timeout": 3}, JobRequest).heartbeat_timeout == 3.0
    assert decode({"command": ["true"], "mode": None}, JobRequest).spec() == JobSpec(
        command=("true",), mode="independent"
    )
    assert decode({}, StopBody) == StopBody(grace_seconds=None, reason=None)
    assert decode({"name": "ci", "scope": "admin"}, TokenRequest).scope is Scope.ADMIN


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
    document = described("0").openapi()
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
