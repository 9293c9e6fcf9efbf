"""How JSON is read, and what is said of what cannot be."""

import json
from importlib import import_module
from pkgutil import iter_modules

import pytest
from fastapi.routing import APIRoute

from api import routes
from api.json_bodies import JsonRoute, value_of
from api.problems import Problem

MOST = b"1" * 4300 + b","
"""As many digits as can be read."""


@pytest.mark.parametrize(
    "body",
    [b'{"a": 1, "b": {"a": [{"a": 2}, {"a": 3}]}}', b"[]", b"null", "\ufeff{}".encode()],
)
def test_it_says_what_it_says_to_anybody(body: bytes) -> None:
    assert value_of(body) == json.loads(body)
    assert value_of("{}".encode("utf-16")) == {}


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b'{"a": 1, "a": 2}', 422, "^body: the name a is given twice$"),
        (b'{"env": [{"b": 1, "x": 1, "x": 1}]}', 422, "the name x is given twice"),
        (b'{"\\ud800": 1, "\\ud800": 2}', 422, r"the name \\ud800 is given twice"),
        (b'{"a\\n": 1, "a\\n": 2}', 422, r"the name a\\n is given twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", 400, "a number at byte 7 has more than 4300 digits"),
        (b"[" + 200 * MOST + b"9" * 4301 + b"]", 400, "a number at byte 860202 has more"),
        (b"[" * 200_000, 400, "its brackets are nested too deep"),
        (b'{"a": "\xff"}', 400, "it is no UTF-8 at byte 8"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_is_wrong(
    body: bytes, status: int, why: str
) -> None:
    with pytest.raises(Problem, match=why) as refused:
        value_of(body)
    assert refused.value.status == status


def test_a_long_name_is_not_said_in_full() -> None:
    name = json.dumps("x" * 5000)
    with pytest.raises(Problem, match="xxx… is given twice") as refused:
        value_of(f"{{{name}: 1, {name}: 2}}".encode())
    assert len(refused.value.detail) < 300


def test_every_route_with_a_body_reads_it_so() -> None:
    modules = [import_module(found.name) for found in iter_modules(routes.__path__, "api.routes.")]
    found = [route for module in modules for route in module.router.routes]
    reading = [route for route in found if isinstance(route, APIRoute) and route.body_field]
    assert len(reading) > 3
    assert all(isinstance(route, JsonRoute) for route in reading)
