"""Request bodies that are not a valid job are refused, and nothing is stored."""

import httpx
import pytest

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"name": NaN}', 422),
        (b'{"sleep_sec": NaN}', 422),
        (b'{"sleep_sec": -1e400}', 422),
        (b'{"seed": true}', 422),
        (b'{"world_size": 4.5}', 422),
        (b'{"world_size": "4"}', 422),
        (b'{"world_size": 0}', 422),
        (b'{"world_size": 99999999999999999999999}', 422),
        (b'{"seed": 9223372036854775808}', 422),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"name": "a\\u0000b"}', 422),
        (b'{"name": "\\ud800"}', 422),
        (b'{"\\ud800": 1}', 422),
        (b'{"env": {"A": "\\ud800"}}', 422),
        (b'{"restart_scope": "gang"}', 422),
        (b'{"job_id": "../etc"}', 422),
        (b'{"job_id": "summaries"}', 422),
        (b'{"job_id": "a\\n"}', 422),
        (b'{"env": {"A=B": "x"}}', 422),
        (b'{"command": []}', 422),
        (b'{"mode": "synchronous", "command": ["true"]}', 422),
        (b'{"mode": "synchronous", "program": "\\u0000.py:Net"}', 422),
        (b'{"mode": "synchronous", "batch_size": 65}', 422),
        (b'{"dataset_dir": "nowhere"}', 422),
        (b'{"resume_from": "unknown"}', 422),
        (b'{"wrold_size": 4}', 422),
        (b"{", 422),
        (b"[]", 422),
        (b"null", 422),
        (b"", 422),
        (b'{"name": "\xff"}', 400),
        (b"[" * 200_000, 400),
        (b'{"a":' * 100_000, 400),
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
