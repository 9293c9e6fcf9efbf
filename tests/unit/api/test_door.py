"""Who wastes is slowed down, and nobody else with them."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from hand import Hand
from starlette.types import ASGIApp, Receive, Scope, Send
from store_samples import NOON
from structlog.contextvars import get_contextvars
from structlog.testing import capture_logs
from unit.api.one_token import TEXT, OneToken

from api.door import Door
from api.identity import Identities
from api.limits import BURST_SECONDS, Limits

SHOWN = {"Authorization": f"Bearer {TEXT}"}

OWN_UID = 7
STRANGER = None


async def answering(scope: Scope, _receive: Receive, send: Send) -> None:
    """Say who was let in."""
    caller = scope["state"].get("caller")
    name = caller.name if caller else "somebody"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": name.encode()})


def door(
    uid: int | None,
    app: ASGIApp = answering,
    tokens: OneToken | None = None,
    *,
    require_token: bool = False,
) -> Door:
    """Return a door at which everybody is this user."""
    return Door(
        app,
        identities=Identities(
            tokens or OneToken(),
            Hand(NOON),
            own_uid=OWN_UID,
            require_token=require_token,
            token_sha256=None,
        ),
        limits=Limits(per_second=1, at_once=2, monotonic=lambda: 0.0),
        caller_uid=lambda _scope: uid,
        hosts=["muster.example"],
    )


def through(one: Door, paths: Sequence[str], *headers: dict[str, str]) -> list[httpx.Response]:
    """Return the answers to GETs, one after another."""

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(one), base_url="http://muster.example"
        ) as client:
            shown = [*headers] or [{}]
            return [await client.get(path, headers=each) for each in shown for path in paths]

    return asyncio.run(ask())


def asked(uid: int | None, paths: Sequence[str], *headers: dict[str, str]) -> list[httpx.Response]:
    """Return the answers to GETs of a user, one after another through one door."""
    return through(door(uid), paths, *headers)


def statuses(answers: list[httpx.Response]) -> list[int]:
    return [answer.status_code for answer in answers]


def test_who_fails_too_often_is_slowed_down_and_locks_nobody_out() -> None:
    wrong = {"Authorization": f"Bearer {TEXT[:-1]}0"}
    answers = asked(STRANGER, ["/jobs"], *[wrong] * 12, SHOWN)
    assert statuses(answers) == [401] * BURST_SECONDS + [429] * 2 + [200]
    assert answers[-2].headers["retry-after"] == "1"
    assert answers[-1].text == "token:ci"


def test_a_token_that_is_used_too_often_is_slowed_down() -> None:
    answers = asked(STRANGER, ["/jobs"] * 12, SHOWN)
    assert statuses(answers) == [200] * BURST_SECONDS + [429] * 2


def test_the_own_user_is_not() -> None:
    answers = asked(OWN_UID, ["/jobs", "/health"] * 12)
    assert statuses(answers) == [200] * 24
    assert answers[0].text == "uid:7"


def test_the_own_user_is_where_anybody_may_come_as_them() -> None:
    answers = through(door(OWN_UID, require_token=True), ["/livez"] * 12)
    assert statuses(answers) == [200] * BURST_SECONDS + [429] * 2


def test_every_refusal_counts() -> None:
    foreign = {"Host": "evil.example"}
    answers = asked(STRANGER, ["/jobs"] * 12, foreign)
    assert statuses(answers) == [403] * BURST_SECONDS + [429] * 2
    away = OneToken(is_away=True)
    answers = through(door(STRANGER, tokens=away), ["/jobs"] * 12, SHOWN)
    assert statuses(answers) == [503] * BURST_SECONDS + [429] * 2


def test_a_made_up_path_is_logged_short_and_harmless() -> None:
    with capture_logs() as logs:
        asked(STRANGER, ["/%1B[2J" + "x" * 1000])
    (told,) = logs
    assert told["path"] == "/\\x1b[2J" + "x" * 195 + "…"


def test_what_is_logged_for_a_request_says_which_and_of_which_trace() -> None:
    said = []

    async def speaking(scope: Scope, receive: Receive, send: Send) -> None:
        said.append(get_contextvars())
        await answering(scope, receive, send)

    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"X-Request-ID": "mine", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    through(door(OWN_UID, speaking), ["/jobs"], headers)
    assert said == [{"request_id": "mine", "trace_id": trace}]


def test_nothing_but_http_is_spoken() -> None:
    reached = []

    async def noting(scope: Scope, _receive: Receive, _send: Send) -> None:
        reached.append(scope["type"])

    for kind in ("websocket", "lifespan", "tomorrow"):
        asyncio.run(door(STRANGER, noting)({"type": kind}, None, None))
    assert reached == ["lifespan"]


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("Train.example:8000", "This service is not known as train.example: ask whoever runs it"),
        ("[2001:db8::1]:8000", "This service is not known as 2001:db8::1: ask whoever runs it"),
        ("<b>x</b>", "The Host header names no machine"),
        ("\x1b[2J", "The Host header names no machine"),
        ("x" * 254, "The Host header names no machine"),
        ("", "The Host header names no machine"),
    ],
)
def test_who_calls_a_service_by_another_name_is_told_whom_to_ask(host: str, said: str) -> None:
    (answer,) = asked(STRANGER, ["/jobs"], {"Host": host})
    detail = answer.json()["detail"]
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/foreign-host")
    assert detail.startswith(said)
    assert "MUSTER_ALLOWED_HOSTS" in detail


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz", "/api/v1/livez"])
def test_bare_probes_are_answered_under_any_name(path: str) -> None:
    foreign = {"Host": "10.1.2.3:8000"}
    answers = asked(STRANGER, [path, "/health", "/jobs"], foreign)
    assert statuses(answers) == [200, 403, 403]


def test_who_may_read_is_known_to_the_probe_that_tells_more() -> None:
    shown = [SHOWN, {"Authorization": "Bearer mst_"}]
    answers = asked(STRANGER, ["/health", "/livez"], *shown)
    assert [answer.text for answer in answers] == ["token:ci", "somebody", "somebody", "somebody"]


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
