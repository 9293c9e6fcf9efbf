"""What YAML says, as JSON; and what it may not say."""

import json

import pytest

from api.problems import Problem
from api.yaml_bodies import DEPTH_LIMIT, VALUES_LIMIT, as_json


def test_what_yaml_says_is_said_in_json() -> None:
    text = "name: r\u00e9sum\u00e9\nworld_size: 2\nenv:\n  DAY: 2026-03-01\ncommand: [a, 'b: c']\n"
    assert json.loads(as_json(text.encode())) == {
        "name": "r\u00e9sum\u00e9",
        "world_size": 2,
        "env": {"DAY": "2026-03-01"},
        "command": ["a", "b: c"],
    }


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a: [1, 2", "at line 2, column 1"),
        (b"a: &x [1]\nb: *x", "write aliases out"),
        (b"[" * (DEPTH_LIMIT + 1), "nest no deeper"),
        (b"[" * 60_000, "nest no deeper"),
        (b"a: !!python/object/apply:os.system [true]", "could not determine a constructor"),
        (b"? [a]\n: b", "a name is no text: put it in quotes at line 1, column 3"),
        (b"env: {yes: 1, on: 2}", "a name is no text: put it in quotes at line 1, column 7"),
        (b"1: a\n0x1: b", "a name is no text: put it in quotes at line 1, column 1"),
        (b"<<: {a: 1}\na: 2", "a name is no text"),
        (b"a: !!binary aGVsbG8=", "JSON has no bytes"),
        (b"a: !!set {b, c}", "JSON has no set"),
        (b"\xff\xfe\xff", "This body is no YAML"),
        (b"a: b\n---\nc: d", "expected a single document"),
        (b"a: " + b"9" * 5000, "a number has more than 100 characters.* at line 1, column 4"),
        (b"a: !!int '" + b"1:" * 5000 + b"1'", "a number has more than 100 characters"),
        (b"a: 0x" + b"f" * 100, "a number has more than 100 characters"),
        (b"a: " + b"9" * 100 + b".5", "a number has more than 100 characters"),
        (b"a: 1\nb: 2\na: 3", "a name is given twice at line 3, column 1"),
        (b"env: [{A: 1, 'A': 2}]", "a name is given twice at line 1, column 14"),
        (b"a: !!bool perhaps", "a value is not what its tag says"),
        (b'a: !!int ""', "a value is not what its tag says"),
        (b'a: !!float ""', "a value is not what its tag says"),
        (b"a: !!timestamp x", "a value is not what its tag says"),
    ],
)
def test_what_json_cannot_say_or_nobody_should_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(Problem, match=why) as refused:
        as_json(text)
    assert (refused.value.status, refused.value.slug) == (422, "invalid-yaml")


def test_what_the_largest_job_says_is_read_and_much_more_is_refused() -> None:
    assert as_json(b"[" + b"x," * (VALUES_LIMIT - 1) + b"]")
    for text in (b"[" + b"x," * VALUES_LIMIT + b"]", b"{" + b"a," * VALUES_LIMIT + b"}"):
        with pytest.raises(Problem, match="4096 names and values at most: send JSON") as refused:
            as_json(text)
        assert refused.value.status == 413


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a: !" + b"x" * 5000 + b" 1", r"for the tag '!x+… at line 1, column 4\.$"),
        (b"a: !!float " + b"x" * 100, r"could not convert string to float: 'x+'\.$"),
    ],
)
def test_a_refusal_says_little_of_what_was_sent(text: bytes, why: str) -> None:
    with pytest.raises(Problem, match=why) as refused:
        as_json(text)
    assert len(refused.value.detail) < 300
