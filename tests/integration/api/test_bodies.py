"""Request bodies that are not a valid job are refused, and nothing is stored."""

import httpx
import pytest

JSON = {"Content-Type": "application/json"}


FIELDS = [
    *[b'"name": NaN', b'"sleep_sec": -1e400', b'"world_size": 4.5', b'"world_size": "4"'],
    *[b'"world_size": 99999999999999999999999', b'"seed": 9223372036854775808', b'"seed": true'],
    *[b'"name": "a\\u0000b"', b'"name": "\\ud800"', b'"\\ud800": 1', b'"env": {"A": "\\ud800"}'],
    *[b'"job_id": "../etc"', b'"job_id": "summaries"', b'"job_id": "a\\n"', b'"command": []'],
    *[b'"env": {"A=B": "x"}', b'"restart_scope": "gang"', b'"wrold_size": 4'],
    *[b'"dataset_dir": "nowhere"', b'"resume_from": "unknown"'],
    b'"mode": "synchronous", "command": ["true"]',
    b'"mode": "synchronous", "program": "\\u0000.py:Net"',
]
NOT_AN_OBJECT = [b"{", b"[]", b"null", b""]
NOT_DECODED = [
    *[b'{"name": "\xff"}', b"[" * 200_000, b'{"a":' * 100_000],
    b'{"seed": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        *[(b"{" + field + b"}", 422) for field in FIELDS],
        *[(body, 422) for body in NOT_AN_OBJECT],
        *[(body, 400) for body in NOT_DECODED],
    ],
)
def test_an_invalid_job_is_refused_and_not_stored(
    client: httpx.Client, body: bytes, expected: int
) -> None:
    before = client.get("/jobs").headers["x-total-count"]
    headers = JSON | {"Idempotency-Key": "once"}
    for answer in (
        client.post("/jobs", content=body, headers=JSON),
        client.post("/jobs", content=body, headers=headers),
    ):
        assert answer.status_code == expected
        assert answer.headers["content-type"] == "application/problem+json"
    assert client.get("/jobs").headers["x-total-count"] == before


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('{"world_size": 2, "command": ["python", ', "line 1, column 41"),
        ('{"world_size": 2,\n "command": [python]}', "line 2, column 14"),
        ("world_size: 2", "line 1, column 1"),
    ],
)
def test_invalid_json_is_refused_with_its_place(
    client: httpx.Client, body: str, place: str
) -> None:
    answer = client.post("/jobs", content=body, headers=JSON)
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["loc"]) == (422, ["body"])
    assert error["msg"].startswith("invalid JSON: ")
    assert error["msg"].endswith(place)


def test_a_yaml_body_is_an_unsupported_media_type(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/yaml"}
    answer = client.post("/jobs", content="world_size: 2\n", headers=headers)
    assert answer.status_code == 415
    assert answer.headers["content-type"] == "application/problem+json"
