"""Who may see the page from another machine, and what a browser's cookie is good for."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import httpx
import pytest

from database.engine import Database
from database.errors import TokenMissing
from database.tokens import Tokens
from muster.contracts.token import Scope
from tests.support.api_service import Service

PAGE = {"accept": "text/html"}
OURS = {"x-muster-page": "1"}
LOCKED = {"MUSTER_REQUIRE_TOKEN": "1", "MUSTER_TOKEN": "f" * 64}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("locked"), **LOCKED)
    running.start()
    yield running
    running.end(signal.SIGKILL)


@pytest.fixture
def token(locked: Service, tmp_path: Path) -> Iterator[tuple[str, Tokens]]:
    database = Database.open(locked.database_url)
    tokens = Tokens(database)
    name = tmp_path.name[:60]
    made = tokens.create(name, Scope.SUBMIT, lifetime=timedelta(hours=1), created_by=None)[1]
    yield made, tokens
    with suppress(TokenMissing):
        tokens.revoke(name)
    database.close()


@pytest.fixture
def browser(locked: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=locked.url, timeout=20) as client:
        yield client


def enter(browser: httpx.Client, token: str) -> httpx.Response:
    return browser.post("/ui/session", headers={"authorization": f"Bearer {token}", **OURS})


def test_without_a_token_a_browser_is_asked_for_one(browser: httpx.Client) -> None:
    for path in ("/ui/", "/ui/service", "/ui/jobs/unknown", "/ui/jobs/unknown/logs"):
        answer = browser.get(path, headers=PAGE)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login")
    assert browser.get("/ui/").status_code == 401, "a program gets an answer for programs"
    assert browser.get("/ui/login", headers=PAGE).status_code == 200
    assert browser.post("/ui/session", headers=OURS).status_code == 401


def test_a_cookie_opens_the_page_and_no_script_reads_it(
    browser: httpx.Client, token: tuple[str, Tokens]
) -> None:
    entered = enter(browser, token[0])
    assert entered.status_code == 204
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert 0 < int(cookie.partition("max-age=")[2].partition(";")[0]) <= 3600
    assert browser.get("/ui/", headers=PAGE).status_code == 200
    browser.delete("/ui/session", headers={"origin": str(browser.base_url), **OURS})
    assert browser.get("/ui/", headers=PAGE).status_code == 303


@pytest.mark.parametrize("other", ['prefs={"theme":"dark"}', "foo[]=1", "a=b,c d", "alone"])
def test_cookies_of_other_services_do_not_hide_ours(
    locked: Service, token: tuple[str, Tokens], other: str
) -> None:
    cookies = f"{other}; muster_token={token[0]}"
    headers = {"cookie": cookies, **PAGE}
    assert httpx.get(f"{locked.url}/ui/", headers=headers).status_code == 200


def test_what_json_cannot_hold_is_refused(client: httpx.Client) -> None:
    for text in ("null: 1", "? [a, b]\n: 1", 'name: "\\uD800"', "a: 0x" + "f" * 5000):
        answer = client.post("/ui/submit/fields", json={"text": text})
        assert answer.status_code == 422, text


def test_an_unknown_rank_has_no_logs(client: httpx.Client, job: str) -> None:
    answer = client.get(f"/ui/jobs/{job}/logs?rank=9")
    assert answer.status_code == 422
    assert "there is no rank 9" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        (OURS, 403),
        ({"origin": "SELF"}, 403),
        ({"origin": "https://evil.example", **OURS}, 403),
        ({"origin": "SELF", **OURS}, 404),  # there is no such job
    ],
)
def test_a_change_with_a_cookie_comes_from_our_page(
    browser: httpx.Client, token: tuple[str, Tokens], headers: dict[str, str], status: int
) -> None:
    enter(browser, token[0])
    own = str(browser.base_url).rstrip("/")
    sent = {name: own if it == "SELF" else it for name, it in headers.items()}
    assert browser.post("/jobs/unknown/stop", json={}, headers=sent).status_code == status


def test_nothing_is_framed_or_loaded_from_elsewhere(
    browser: httpx.Client, token: tuple[str, Tokens]
) -> None:
    enter(browser, token[0])
    page = browser.get("/ui/", headers=PAGE)
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'self'")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "<style" not in page.text
    assert " style=" not in page.text


def test_a_stream_ends_with_its_token(
    browser: httpx.Client, locked: Service, token: tuple[str, Tokens], tmp_path: Path
) -> None:
    enter(browser, token[0])
    with browser.stream("GET", "/jobs/summaries/stream", timeout=60) as stream:
        lines = stream.iter_lines()
        assert any(line.startswith("event: summary") for line in lines)
        token[1].revoke(tmp_path.name[:60])
        assert not any(line.startswith("event: end") for line in lines), "nothing has ended"
    assert locked.log.read_text().count("revoked-token") >= 1


def test_an_old_cookie_keeps_our_own_user_from_nothing(service: Service) -> None:
    with httpx.Client(base_url=service.url, cookies={"muster_token": "mst_old"}) as client:
        assert client.get("/ui/", headers=PAGE).status_code == 200
        assert client.post("/jobs/unknown/stop", json={}).status_code == 404


def test_a_job_file_is_read_without_loss(service: Service) -> None:
    with httpx.Client(base_url=service.url) as client:

        def read(text: str) -> httpx.Response:
            return client.post("/ui/submit/fields", json={"text": text}, headers=OURS)

        assert read("seed: 9223372036854775807 # largest").text == '{"seed":9223372036854775807}'
        assert (read("").json(), read('{"env": {}}').json()) == ({}, {"env": {}})
        for text, where in (("a: 1\na: 2", "line:2:1"), ("- a", "world_size"), ("a: [", "line:1")):
            refused = read(text)
            assert refused.status_code == 422
            assert where in refused.json()["detail"]


def test_a_script_that_saves_nothing_has_no_checkpoint(service: Service) -> None:
    with httpx.Client(base_url=service.url) as client:
        made = client.post("/jobs", json={"command": ["true"], "world_size": 1}).json()
        path = f"/ui/jobs/{made['job_id']}/checkpoints"
        assert "muster checkpoint now" in client.get(path).text
        assert client.get("/ui/jobs/unknown/checkpoints").status_code == 404
        assert client.get("/ui/submit?resume_from=unknown").status_code == 404
