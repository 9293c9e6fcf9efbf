"""What the service says of itself when something is missing."""

from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request
from structlog.testing import capture_logs

from api.desk import FrontDesk
from api.problems import Problem
from api.routes import health as routes
from api.routes.health import get_readiness, health
from muster.contracts.layout import DataDirectory
from store.errors import StoreUnavailable

Usage = namedtuple("Usage", "total used free")  # noqa: PYI024  as shutil's own
GIB = 1 << 30


def desk(root: Path, *, database: str | None = None, coordinator: str | None = None) -> FrontDesk:
    """Return what the routes of this module use, with something missing from it."""

    def check() -> None:
        if database is not None:
            raise StoreUnavailable(database)

    parts: dict[str, Any] = {
        "database": SimpleNamespace(check=check),
        "coordinator": SimpleNamespace(absence=lambda: coordinator),
        "files": DataDirectory(root),
        "uptime_seconds": lambda: 1.0,
        "version": "1",
    }
    return cast(FrontDesk, SimpleNamespace(**parts))


def asked_by(caller: str | None) -> Request:
    """Return the request of somebody known, or of nobody."""
    return Request({"type": "http", "state": {} if caller is None else {"caller": caller}})


def test_readiness_tells_the_log_what_fails_and_nobody_else(tmp_path: Path) -> None:
    assert get_readiness(desk(tmp_path, coordinator="none is running")).status == "ok"
    with pytest.raises(Problem) as refused, capture_logs() as logs:
        get_readiness(desk(tmp_path, database="the disk is gone"))
    assert (refused.value.status, refused.value.slug) == (503, "not-ready")
    assert "disk" not in refused.value.detail
    assert [log["reason"] for log in logs] == ["the disk is gone"]


def test_who_may_not_read_is_told_no_more_than_what_is_well(tmp_path: Path) -> None:
    gone = desk(tmp_path / "gone", database="sqlite:///secret")
    found = health(gone, asked_by(None))
    assert (found.status, found.version) == ("degraded", None)
    assert [(name, check.status, check.detail) for name, check in found.checks] == [
        ("database", "degraded", ""),
        ("coordinator", "ok", ""),
        ("disk", "degraded", ""),
    ]
    assert health(gone, asked_by("ci")).checks.database.detail == "sqlite:///secret"


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [
        (1000 * GIB, 2 * GIB, "ok"),
        (1000 * GIB, GIB - 1, "degraded"),
        (4 * GIB, GIB // 2, "ok"),
        (4 * GIB, GIB // 8, "degraded"),
    ],
)
def test_a_disk_that_is_nearly_full_degrades(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, status: str
) -> None:
    usage = Usage(total, total - free, free)
    monkeypatch.setattr(routes.shutil, "disk_usage", lambda _path: usage)
    found = health(desk(tmp_path), asked_by("ci"))
    assert found.status == found.checks.disk.status == status
    assert f"{free >> 20} MiB" in found.checks.disk.detail


@pytest.mark.parametrize(
    ("total", "free", "status"),
    [(65_536, 3_276, "degraded"), (65_536, 3_277, "ok"), (10**8, 9_999, "degraded"), (0, 0, "ok")],
)
def test_a_disk_that_holds_few_more_files_degrades(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, status: str
) -> None:
    monkeypatch.setattr(routes.shutil, "disk_usage", lambda _path: Usage(100 * GIB, 0, 100 * GIB))
    files = SimpleNamespace(f_files=total, f_favail=free)
    monkeypatch.setattr(routes.os, "statvfs", lambda _path: files)
    found = health(desk(tmp_path), asked_by("ci"))
    assert found.status == found.checks.disk.status == status
    assert (f"only {free} more files" in found.checks.disk.detail) == (status == "degraded")


def test_a_data_directory_that_is_gone_degrades(tmp_path: Path) -> None:
    found = health(desk(tmp_path / "gone"), asked_by("ci"))
    assert (found.status, found.checks.database.status) == ("degraded", "ok")
    assert "gone" in found.checks.disk.detail
