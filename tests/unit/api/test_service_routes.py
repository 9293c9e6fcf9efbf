"""Probes report what is missing, with details for callers only."""

from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from fastapi import Request
from markupsafe import escape
from structlog.testing import capture_logs

from api.dependencies import AppState
from api.errors import Problem
from api.routes import service as routes
from api.routes.service import get_readiness
from api.server import create_app
from database.errors import DatabaseUnavailable
from muster.contracts.settings.paths import DataDir
from muster.contracts.views.service import Health

Usage = namedtuple("Usage", "total used free")  # noqa: PYI024  as shutil's own
GIB = 1 << 30
MARKUP = '<i">'


def app_state(
    root: Path, *, database: str | None = None, coordinator: str | None = None
) -> AppState:
    """Return what these routes use, with something missing."""

    def check() -> None:
        if database is not None:
            raise DatabaseUnavailable(database)

    parts: dict[str, Any] = {
        "database": SimpleNamespace(revision=check),
        "coordinator": SimpleNamespace(absence=lambda: coordinator),
        "data_dir": DataDir(root),
        "uptime_seconds": lambda: 1.0,
        "version": "1",
    }
    return cast(AppState, SimpleNamespace(**parts))


def request_of(caller: str | None) -> Request:
    """Return a request, anonymous without a caller."""
    return Request({"type": "http", "state": {} if caller is None else {"caller": caller}})


def health(state: AppState, request: Request) -> Health:
    """Return the decoded answer."""
    return msgspec.json.decode(routes.health(state, request).body, type=Health)


def test_readiness_gives_its_reason_to_the_log_only(tmp_path: Path) -> None:
    assert get_readiness(app_state(tmp_path, coordinator="none is running")).status_code == 200
    with pytest.raises(Problem) as refused, capture_logs() as logs:
        get_readiness(app_state(tmp_path, database="the disk is gone"))
    assert (refused.value.status, refused.value.slug) == (503, "not-ready")
    assert "disk" not in refused.value.detail
    assert [log["reason"] for log in logs] == ["the disk is gone"]


def test_an_anonymous_caller_gets_no_details(tmp_path: Path) -> None:
    gone = app_state(tmp_path / "gone", database="sqlite:///secret")
    found = health(gone, request_of(None))
    assert (found.status, found.version) == ("degraded", None)
    checks = {name: getattr(found.checks, name) for name in found.checks.__struct_fields__}
    assert [(name, check.status, check.detail) for name, check in checks.items()] == [
        ("database", "degraded", ""),
        ("coordinator", "ok", ""),
        ("disk", "degraded", ""),
    ]
    assert health(gone, request_of("ci")).checks.database.detail == "sqlite:///secret"


@pytest.mark.parametrize(
    ("usage", "files", "status", "seen"),
    [
        ((1000 * GIB, 2 * GIB), (0, 0), "ok", "2 GiB"),
        ((1000 * GIB, GIB - 1), (0, 0), "degraded", "1024 MiB"),
        ((4 * GIB, GIB // 2), (0, 0), "ok", "512 MiB"),
        ((4 * GIB, GIB // 8), (0, 0), "degraded", "128 MiB"),
        ((4 * GIB, 4 * GIB), (65_536, 3_277), "ok", "free"),
        ((4 * GIB, 4 * GIB), (65_536, 3_276), "degraded", "only 3276 more files"),
        ((4 * GIB, 4 * GIB), (10**8, 9_999), "degraded", "only 9999 more files"),
    ],
)
def test_a_nearly_full_disk_degrades(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    usage: tuple[int, int],
    files: tuple[int, int],
    status: str,
    seen: str,
) -> None:
    room = Usage(total=usage[0], used=0, free=usage[1])
    inodes = SimpleNamespace(f_files=files[0], f_favail=files[1])
    monkeypatch.setattr(routes.shutil, "disk_usage", lambda _path: room)
    monkeypatch.setattr(routes.os, "statvfs", lambda _path: inodes)
    found = health(app_state(tmp_path), request_of("ci"))
    assert found.status == found.checks.disk.status == status
    assert seen in found.checks.disk.detail


def test_a_missing_data_directory_degrades(tmp_path: Path) -> None:
    found = health(app_state(tmp_path / "gone"), request_of("ci"))
    assert (found.status, found.checks.database.status) == ("degraded", "ok")
    assert "gone" in found.checks.disk.detail


@pytest.mark.slow
def test_pages_escape_every_word_of_the_document() -> None:
    document = hostile(create_app().openapi())
    app = SimpleNamespace(openapi=lambda: document)
    page = routes.get_docs(cast(Request, SimpleNamespace(app=app)))
    text = bytes(page.body).decode()
    assert escape(MARKUP) in text
    assert MARKUP not in text


def hostile(part: object, *, are_names: bool = False) -> object:
    """Return an OpenAPI document with markup before every word."""
    match part:
        case dict():
            return {
                MARKUP * are_names + name: hostile(
                    value, are_names=name in {"paths", "schemas", "properties"}
                )
                for name, value in part.items()
            }
        case list():
            return [hostile(item) for item in part]
        case str():
            return MARKUP + part
    return part
