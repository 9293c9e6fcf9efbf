"""Who wastes is slowed down, and nobody else with them."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from unit.api.one_token import TEXT, Hand, OneToken

from api.door import Door
from api.identity import Identities
from api.limits import BURST_SECONDS, Limits

OWN_UID = 7
STRANGER = None


async def answering(scope: Scope, _receive: Receive, send: Send) -> None:
    """Say who was let in."""
    caller = scope["state"].get("caller")
    name = caller.name if caller else "somebody"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": name.encode()})


def asked(uid: int | None, paths: Sequence[str], *headers: dict[str, str]) -> list[httpx.Response]:
    """Return the answers to GETs of a user, one after another through one door."""
    door = Door(
        answering,
        identities=Identities(
            OneToken(), Hand(), own_uid=OWN_UID, require_token=False, token_sha256=None
        ),
        limits=Limits(per_second=1, at_once=2, monotonic=lambda: 0.0),
        caller_uid=lambda _scope: uid,
        hosts=["muster.example"],
    )

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(door), base_url="http://muster.example"
        ) as client:
            shown = [*headers] or [{}]
            return [await client.get(path, headers=one) for one in shown for path in paths]

    return asyncio.run(ask())


def statuses(answers: list[httpx.Response]) -> list[int]:
    return [answer.status_code for answer in answers]


def test_who_fails_too_often_is_slowed_down_and_locks_nobody_out() -> None:
    wrong = {"Authorization": f"Bearer {TEXT[:-1]}0"}
    answers = asked(STRANGER, ["/jobs"], *[wrong] * 12, {"Authorization": f"Bearer {TEXT}"})
    assert statuses(answers) == [401] * BURST_SECONDS + [429] * 2 + [200]
    assert answers[-2].headers["retry-after"] == "1"
    assert answers[-1].text == "token:ci"


def test_a_token_that_is_used_too_often_is_slowed_down() -> None:
    answers = asked(STRANGER, ["/jobs"] * 12, {"Authorization": f"Bearer {TEXT}"})
    assert statuses(answers) == [200] * BURST_SECONDS + [429] * 2


def test_the_own_user_is_not() -> None:
    answers = asked(OWN_UID, ["/jobs", "/health"] * 12)
    assert statuses(answers) == [200] * 24
    assert answers[0].text == "uid:7"


@pytest.mark.parametrize("prefix", ["", "/api/v1"])
def test_whoever_watches_over_a_service_needs_no_token(prefix: str) -> None:
    probes = [f"{prefix}/{name}" for name in ("health", "healthz", "livez", "readyz")]
    answers = asked(STRANGER, [*probes, *probes, *probes])
    assert statuses(answers) == [200] * BURST_SECONDS + [429] * 2


@pytest.mark.parametrize(
    "path", ["/", "/jobs", "/healthy", "/health/", "/api/v1/api/v1/health", "/x/health"]
)
def test_what_is_no_probe_needs_one(path: str) -> None:
    (answer,) = asked(STRANGER, [path])
    assert (answer.status_code, answer.json()["type"]) == (401, "/problems/no-token")
