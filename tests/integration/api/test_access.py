"""Every route of the OpenAPI document with every kind of credential."""

import signal
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from database.engine import Database
from database.records import utc_now
from database.tokens import Tokens
from muster.contracts.token import Scope
from tests.support.api_service import DEADLINE_SECONDS, Service

Credentials = Mapping[str, str | None]

ENVIRONMENT_TOKEN = "f" * 64

LOOKS = {"GET": Scope.READ}
"""Any other method on a job changes it."""


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that requires a token of every caller."""
    root: Path = tmp_path_factory.mktemp("locked")
    settings = {"MUSTER_REQUIRE_TOKEN": "1", "MUSTER_TOKEN": ENVIRONMENT_TOKEN}
    running = Service(root, **settings)
    running.start()
    yield running
    if running.process is not None:
        running.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def credentials(locked: Service) -> Iterator[Credentials]:
    """Valid and invalid Authorization headers by name."""
    database = Database.open(locked.database_url)
    tokens = Tokens(database)
    past = Tokens(database, lambda: utc_now() - timedelta(days=2))

    def made(name: str, scope: Scope) -> str:
        return tokens.create(name, scope, lifetime=timedelta(days=1), created_by=None)[1]

    shown = {f"{scope}": made(scope, scope) for scope in Scope}
    expired = past.create("old", Scope.ADMIN, lifetime=timedelta(days=1), created_by=None)[1]
    revoked = made("gone", Scope.ADMIN)
    tokens.revoke("gone")
    yield {
        "none": None,
        "empty": "Bearer",
        "basic": "Basic YWRtaW46YWRtaW4=",
        "garbage": "Bearer garbage",
        "wrong": f"Bearer {shown['admin'][:-1]}{'1' if shown['admin'][-1] == '0' else '0'}",
        "unknown": f"Bearer mst_{'0' * 12}_{'0' * 64}",
        "expired": f"Bearer {expired}",
        "revoked": f"Bearer {revoked}",
        "environment": f"Bearer {ENVIRONMENT_TOKEN}",
        **{scope: f"Bearer {text}" for scope, text in shown.items()},
    }
    database.close()


SCOPE_OF = {**{scope.value: scope for scope in Scope}, "environment": Scope.ADMIN}
"""The scope of each valid credential."""


def asking(service: Service, authorization: str | None) -> httpx.Client:
    headers = {} if authorization is None else {"Authorization": authorization}
    return httpx.Client(base_url=service.url, headers=headers, timeout=DEADLINE_SECONDS)


def needed_by(method: str, path: str) -> Scope | None:
    """Return the scope that a route must declare; None for a probe."""
    plain = path.removeprefix("/api/v1")
    if plain in {"/health", "/healthz", "/livez", "/readyz"}:
        return None
    if plain.startswith("/tokens") or plain.endswith("/sweep"):
        return Scope.ADMIN
    return LOOKS.get(method, Scope.SUBMIT)


def operations(document: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_route_declares_its_scope(locked: Service, credentials: Credentials) -> None:
    with asking(locked, credentials["read"]) as client:
        found = operations(client.get("/openapi.json").json())
    assert len(found) >= 15
    declared = {
        (method, path): operation.get("security", [None])[0] for method, path, operation in found
    }
    assert declared == {
        (method, path): None if scope is None else {"token": [scope]}
        for method, path, _ in found
        for scope in [needed_by(method, path)]
    }


def test_every_route_admits_exactly_its_scope(locked: Service, credentials: Credentials) -> None:
    with asking(locked, credentials["read"]) as client:
        found = operations(client.get("/openapi.json").json())
    wrong = []
    for name, authorization in credentials.items():
        with asking(locked, authorization) as client:
            for method, path, _ in found:
                # Not its content: a stream of the list of jobs has no end.
                with client.stream(method, filled(path), **body_of(method)) as answer:
                    status = answer.status_code
                if not is_as_it_should_be(status, needed_by(method, path), SCOPE_OF.get(name)):
                    wrong.append((name, method, path, status))
    assert wrong == []


def is_as_it_should_be(status: int, needed: Scope | None, scope: Scope | None) -> bool:
    if needed is None:
        return status == 200
    if scope is None:
        return status == 401
    return (status == 403) if not scope.covers(needed) else status not in {401, 403}


def filled(path: str) -> str:
    return (
        path.replace("{worker_id}", "0").replace("{job_id}", "unknown").replace("{name}", "unknown")
    )


def body_of(method: str) -> dict[str, Any]:
    return {"json": {}} if method in {"POST", "PATCH"} else {}


def test_a_token_is_shown_once_and_ends_when_revoked(
    locked: Service, credentials: Credentials
) -> None:
    with asking(locked, credentials["environment"]) as client:
        created = client.post("/tokens", json={"name": "ci", "scope": "submit"})
        made = created.json()
        assert (created.status_code, created.headers["cache-control"]) == (201, "no-store")
        assert client.post("/tokens", json={"name": "ci"}).status_code == 409
        listed = client.get("/tokens")
        assert made["token"].split("_")[2] not in listed.text
        with asking(locked, f"Bearer {made['token']}") as holder:
            assert holder.get("/jobs").status_code == 200
            (row,) = [t for t in client.get("/tokens").json()["tokens"] if t["name"] == "ci"]
            assert (row["created_by"], row["is_valid"]) == ("MUSTER_TOKEN", True)
            assert row["last_used_at"] is not None
            assert client.delete("/tokens/ci").json()["is_valid"] is False
            refused = holder.get("/jobs")
            assert (refused.status_code, refused.json()["type"]) == (401, "/problems/revoked-token")
        assert client.delete("/tokens/ci").status_code == 404
        assert client.post("/tokens", json={"name": "ci"}).status_code == 201
    secrets = [made["token"], made["token"].split("_")[2], ENVIRONMENT_TOKEN]
    kept = b"".join(path.read_bytes() for path in locked.files.root.rglob("*") if path.is_file())
    assert not [secret for secret in secrets if secret.encode() in kept]


def test_a_token_revoked_during_its_body_submits_nothing(
    locked: Service, credentials: Credentials
) -> None:
    head = (
        "POST /jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 20\r\n"
        "Content-Type: application/json\r\nExpect: 100-continue\r\nAuthorization: Bearer "
    )
    address = ("127.0.0.1", locked.port)
    with asking(locked, credentials["environment"]) as client:
        text = client.post("/tokens", json={"name": "slow", "scope": "submit"}).json()["token"]
        before = client.get("/jobs").headers["x-total-count"]
        with socket.create_connection(address, timeout=DEADLINE_SECONDS) as sender:
            sender.sendall(f'{head}{text}\r\n\r\n{{"command":'.encode())
            assert sender.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n", "the headers were accepted"
            client.delete("/tokens/slow")
            sender.sendall(b'["true"]}')
            answer = b"".join(iter(lambda: sender.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 401")
        assert b"/problems/revoked-token" in answer
        assert client.get("/jobs").headers["x-total-count"] == before


def test_idempotency_keys_belong_to_one_token(locked: Service, credentials: Credentials) -> None:
    made = []
    with asking(locked, credentials["environment"]) as client:
        for _ in range(2):
            text = client.post("/tokens", json={"name": "heir", "scope": "submit"}).json()["token"]
            with asking(locked, f"Bearer {text}") as holder:
                key = {"Idempotency-Key": "k"}
                answers = [holder.post("/jobs", json={}, headers=key) for _ in range(2)]
            assert "idempotency-replayed" not in answers[0].headers
            assert answers[1].headers["idempotency-replayed"] == "true"
            made.append({answer.json()["job_id"] for answer in answers})
            client.delete("/tokens/heir")
    assert [len(ids) for ids in made] == [1, 1]
    assert made[0] != made[1]


def test_an_event_names_its_actor(locked: Service, credentials: Credentials) -> None:
    with asking(locked, credentials["submit"]) as client:
        job = client.post("/jobs", json={"mode": "synchronous"}).json()["job_id"]
    with asking(locked, credentials["environment"]) as client:
        client.post(f"/jobs/{job}/pause")
        client.post(f"/jobs/{job}/stop")
        events = client.get(f"/jobs/{job}/events").json()["events"]
    assert [(event["kind"], event["actor"]) for event in events] == [
        ("submitted", "token:submit"),
        ("pause_requested", "MUSTER_TOKEN"),
        ("stop_requested", "MUSTER_TOKEN"),
    ]


def test_scope_read_sees_no_environment_values(locked: Service, credentials: Credentials) -> None:
    env = {"HF_TOKEN": "hf_shown_to_few", "LR": "0.1"}
    with asking(locked, credentials["submit"]) as client:
        asked = {"command": ["true"], "labels": {"sweep": "lr"}}
        client.post("/jobs", json=asked).raise_for_status()
        job = client.post("/jobs", json=asked | {"env": env}).json()
        assert job["spec"]["env"] == env
        assert "env shows HF_TOKEN" in job["message"]
        assert client.get(f"/jobs/{job['job_id']}").json()["spec"]["env"] == env
    with asking(locked, credentials["read"]) as client:
        seen = client.get(f"/jobs/{job['job_id']}").json()
        listed = client.get("/jobs").text
        waited = client.get(f"/jobs/{job['job_id']}?wait=0.1").text
        compared = client.get("/leaderboard").text
    assert seen["spec"] == job["spec"] | {"env": {"HF_TOKEN": "…", "LR": "…"}}
    assert '"env.HF_TOKEN":"…"' in compared
    assert "hf_shown_to_few" not in listed + waited + compared
