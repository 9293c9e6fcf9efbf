"""Where a service may listen, and what it says if it may not."""

import json
import sqlite3
from pathlib import Path

import pytest

from api.startup_checks import (
    StartupProblem,
    check_certificate,
    check_listening,
    run_checks,
)
from database import HEAD
from database.engine import CONNECTIONS_NEEDED, Database
from database.tokens import Tokens
from muster.contracts.settings.services import AccessSettings, ServiceSettings
from muster.contracts.token import Scope
from tests.support.certificates import key_of, needs_openssl, own_certificate

TOKEN = {"MUSTER_TOKEN": "t" * 32}
TLS = {"MUSTER_TLS_CERTFILE": "/certificate.pem"}
PLAIN = {"MUSTER_ALLOW_PLAIN_HTTP": "1"}
REQUIRED = {"MUSTER_REQUIRE_TOKEN": "1"}

ANYWHERE = "0.0.0.0"  # noqa: S104  refused


def listen(address: str, environ: dict[str, str], *, has_token: bool = False) -> None:
    settings = ServiceSettings.read({"MUSTER_HOST": address}, cores=1)
    found = check_listening(settings, AccessSettings.read(environ), lambda: has_token)
    assert found == address


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.10", "::1"])
def test_loopback_needs_nothing(address: str) -> None:
    listen(address, {})


@pytest.mark.parametrize("address", [ANYWHERE, "::", "192.168.1.5", "10.0.0.1", "2001:db8::1"])
def test_any_other_address_needs_a_token_and_encryption(address: str) -> None:
    for environ in ({}, TLS, PLAIN, TLS | PLAIN):
        with pytest.raises(StartupProblem) as refused:
            listen(address, environ)
        assert refused.value.why == "there is no token"
    for environ, has_token in [(TOKEN, False), ({}, True)]:
        with pytest.raises(StartupProblem) as refused:
            listen(address, environ, has_token=has_token)
        assert "unencrypted" in refused.value.why
        listen(address, environ | TLS, has_token=has_token)
        listen(address, environ | PLAIN, has_token=has_token)


def test_a_required_token_must_exist() -> None:
    with pytest.raises(StartupProblem, match="muster token create NAME --scope admin"):
        listen("127.0.0.1", REQUIRED)
    listen("127.0.0.1", REQUIRED, has_token=True)
    listen("127.0.0.1", REQUIRED | TOKEN)


@needs_openssl
def test_a_certificate_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    certfile = own_certificate(tmp_path)
    keyfile = key_of(certfile)
    check_certificate(certfile, keyfile)
    other = tmp_path / "list.pem"
    other.write_text("milk\n")
    for pair in [
        (other, None),
        (tmp_path / "nowhere.pem", None),
        (keyfile, certfile),
        (certfile, None),
    ]:
        with pytest.raises(StartupProblem, match=f"{pair[0]}.*MUSTER_TLS_KEYFILE"):
            check_certificate(*pair)


def checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, **environ: str
) -> tuple[int, dict[str, object], list[str]]:
    code = run_checks({"MUSTER_DATA_DIR": str(tmp_path), **environ})
    report = json.loads(capsys.readouterr().out)
    return code, report, [problem["check"] for problem in report["problems"]]


def test_check_reports_a_database_without_creating_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, report, problems = checked(capsys, tmp_path)
    assert (code, problems, report["address"]) == (0, [], "127.0.0.1")
    assert report["database"] == {"kind": "sqlite", "revision": None, "expected_revision": HEAD}
    assert report["has_admin_token"] is False
    assert list(tmp_path.iterdir()) == []
    database = Database.open(f"sqlite:///{tmp_path}/muster.db")
    Tokens(database).create("ops", Scope.ADMIN, lifetime=None, created_by=None)
    database.close()
    code, report, problems = checked(capsys, tmp_path, **REQUIRED)
    assert (code, problems, report["has_admin_token"]) == (0, [], True)
    assert report["database"] == {
        "kind": "sqlite",
        "revision": HEAD,
        "expected_revision": HEAD,
        "version": sqlite3.sqlite_version,
        "connections_needed": CONNECTIONS_NEEDED,
    }


@pytest.mark.parametrize(
    ("environ", "problems"),
    [
        ({"MUSTER_PORT": "many"}, ["settings"]),
        (REQUIRED, ["token"]),
        ({"MUSTER_HOST": ANYWHERE}, ["exposure"]),
        ({"MUSTER_HOST": "no such host"}, ["address"]),
        (TLS, ["tls"]),
        ({"MUSTER_DATABASE_URL": "floppy://a"}, ["database"]),
        ({"MUSTER_DATABASE_URL": "floppy://a", **REQUIRED}, ["database"]),
    ],
)
def test_check_reports_each_problem_once(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    environ: dict[str, str],
    problems: list[str],
) -> None:
    code, report, found = checked(capsys, tmp_path, **environ)
    assert (code, found) == (1, problems)
    for problem in report["problems"]:  # type: ignore[attr-defined]
        assert problem.keys() == {"check", "what", "why", "next"}
        assert problem["what"]
