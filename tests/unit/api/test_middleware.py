"""Requests are admitted, refused, limited and logged before any route sees them."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.contextvars import get_contextvars
from structlog.testing import capture_logs

from api.access import connections
from api.access.connections import peer_uid
from api.access.middleware import AccessMiddleware
from api.access.rate_limits import BURST_SECONDS, RateLimiter
from tests.unit.api.token_store import OWN_UID, TEXT, TokenStore, make_authenticator, sent_by

SHOWN = {"Authorization": f"Bearer {TEXT}"}

STRANGER = None


async def answering(scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer with the caller's name."""
    caller = scope["state"].get("caller")
    name = caller.name if caller else "anonymous"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": name.encode()})


def guarded(
    uid: int | None,
    app: ASGIApp = answering,
    tokens: TokenStore | None = None,
    *,
    require_token: bool = False,
    is_copied: bool = True,
) -> ASGIApp:
    """Return the middleware of a service whose clients all have this user id."""

    async def acknowledge() -> bool:
        return is_copied

    middleware = AccessMiddleware(
        app,
        authenticator=make_authenticator(tokens or TokenStore(), require_token=require_token),
        limiter=RateLimiter(per_second=1, at_once=2, monotonic=lambda: 0.0),
        hosts=["muster.example"],
        requests=Counter(),
        acknowledge=acknowledge,
    )
    return sent_by(uid, middleware)


def get_all(app: ASGIApp, paths: Sequence[str], *headers: dict[str, str]) -> list[httpx.Response]:
    """Return the answers to GETs, one after another."""

    async def get() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://muster.example"
        ) as client:
            return [
                await client.get(path, headers=each) for each in headers or [{}] for path in paths
            ]

    return asyncio.run(get())


def statuses(answers: list[httpx.Response]) -> list[int]:
    return [answer.status_code for answer in answers]


def test_failed_logins_do_not_lock_out_a_token() -> None:
    wrong = {"Authorization": f"Bearer {TEXT[:-1]}0"}
    answers = get_all(guarded(STRANGER), ["/jobs"], *[wrong] * 12, SHOWN)
    assert statuses(answers) == [401] * BURST_SECONDS + [429] * 2 + [200]
    assert answers[-2].headers["retry-after"] == "1"
    assert answers[-1].text == "token:ci"


def test_requests_with_a_token_are_limited() -> None:
    answers = get_all(guarded(STRANGER), ["/jobs"] * 12, SHOWN)
    assert statuses(answers) == [200] * BURST_SECONDS + [429] * 2


def test_the_own_user_has_no_limits_unless_a_token_is_required() -> None:
    answers = get_all(guarded(OWN_UID), ["/jobs", "/health"] * 12)
    assert statuses(answers) == [200] * 24
    assert answers[0].text == "uid:7"
    answers = get_all(guarded(OWN_UID, require_token=True), ["/livez"] * 12)
    assert statuses(answers) == [200] * BURST_SECONDS + [429] * 2


@pytest.mark.parametrize(
    ("is_away", "header", "status"),
    [(False, {"Host": "evil.example"}, 403), (True, SHOWN, 503)],
)
def test_refused_requests_count_against_the_limit(
    header: dict[str, str], status: int, *, is_away: bool
) -> None:
    app = guarded(STRANGER, tokens=TokenStore(is_away=is_away))
    answers = get_all(app, ["/jobs"] * 12, header)
    assert statuses(answers) == [status] * BURST_SECONDS + [429] * 2


@pytest.mark.parametrize(
    ("method", "status", "is_copied", "is_warned"),
    [
        ("POST", 201, True, False),
        ("POST", 201, False, True),
        ("DELETE", 200, False, True),
        ("POST", 409, False, False),
        ("GET", 200, False, False),
    ],
)
def test_a_change_that_is_not_copied_has_a_warning(
    method: str, status: int, *, is_copied: bool, is_warned: bool
) -> None:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(guarded(OWN_UID, answer, is_copied=is_copied))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, "/jobs")

    assert ("warning" in asyncio.run(ask()).headers) is is_warned


def test_a_path_is_logged_short_and_printable() -> None:
    with capture_logs() as logs:
        get_all(guarded(STRANGER), ["/%1B[2J" + "x" * 1000])
    (line,) = logs
    assert line["path"] == "/\\x1b[2J" + "x" * 195 + "…"


def test_log_lines_of_a_request_have_its_id() -> None:
    bound = []

    async def logging(scope: Scope, receive: Receive, send: Send) -> None:
        bound.append(get_contextvars())
        await answering(scope, receive, send)

    get_all(guarded(OWN_UID, logging), ["/jobs"], {"X-Request-ID": "mine"})
    assert bound == [{"request_id": "mine"}]


def test_only_http_reaches_the_application() -> None:
    reached = []

    async def noting(scope: Scope, _receive: Receive, _send: Send) -> None:
        reached.append(scope["type"])

    for kind in ("websocket", "lifespan", "tomorrow"):
        asyncio.run(guarded(STRANGER, noting)({"type": kind}, None, None))
    assert reached == ["lifespan"]


@pytest.mark.parametrize("host", ["train.example:8000", "<b>x</b>", "\x1b[2J", "x" * 254])
def test_an_unknown_host_is_refused_and_not_repeated(host: str) -> None:
    (answer,) = get_all(guarded(STRANGER), ["/jobs"], {"Host": host})
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/foreign-host")
    assert "MUSTER_ALLOWED_HOSTS" in answer.json()["detail"]
    assert host not in answer.json()["detail"]


def test_health_knows_its_caller_and_livez_does_not() -> None:
    headers = [SHOWN, {"Authorization": "Bearer mst_"}]
    answers = get_all(guarded(STRANGER), ["/health", "/livez"], *headers)
    assert [answer.text for answer in answers] == ["token:ci", *["anonymous"] * 3]


@pytest.mark.parametrize("prefix", ["", "/api/v1"])
def test_probes_need_no_token_and_are_limited(prefix: str) -> None:
    probes = [f"{prefix}/{name}" for name in ("health", "healthz", "livez", "readyz")]
    answers = get_all(guarded(STRANGER), [*probes, *probes, *probes])
    assert statuses(answers) == [200] * BURST_SECONDS + [429] * 2


def test_only_clients_of_this_machine_have_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "uid_of_connection", lambda *_ends: OWN_UID)

    def uid_between(client: str, server: str) -> int | None:
        return peer_uid((client, 1), (server, 2))

    assert uid_between("192.0.2.7", "192.0.2.1") is None
    assert uid_between("2001:db8::7", "2001:db8::1") is None
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "192.0.2.1"):
        assert uid_between(host, host) == OWN_UID
    assert peer_uid(None, ("127.0.0.1", 2)) is None
