"""Is this service serving, can it reach what it needs, and which one is it?"""

import os
import shutil
from http import HTTPStatus
from typing import Final, Literal

import structlog
from fastapi import APIRouter, Request, Response

from api.access import API_VERSION, OPEN, READ
from api.desk import Desk, FrontDesk
from api.problems import Problem
from api.responses import refusals
from api.schemas import Alive, Check, Checks, Health, Version
from muster.contracts.room import has_few_files_left, is_nearly_full
from store.errors import StoreError

_LOG: Final = structlog.get_logger("api")

router = APIRouter(tags=["service"])


@router.get(
    "/health", summary="Liveness, version, database, coordinator and disk", dependencies=[OPEN]
)
def health(desk: Desk, request: Request) -> Health:
    """Answer 200 as long as this process serves; `status` says whether everything is there.

    Whoever may read is told more.
    """
    checks = Checks(database=_database(desk), coordinator=_coordinator(desk), disk=_disk(desk))
    found = Health(
        status=_status(all(check.status == "ok" for _, check in checks)),
        version=desk.version,
        uptime_seconds=desk.uptime_seconds(),
        checks=checks,
    )
    return found if "caller" in request.scope["state"] else _for_anybody(found)


# A coroutine: it must answer when every thread is busy.
@router.get("/healthz", include_in_schema=False, dependencies=[OPEN])
@router.get("/livez", summary="Whether this process lives; also at /healthz", dependencies=[OPEN])
async def get_liveness() -> Alive:
    """Answer 200 and ask nobody: what fails here is cured by a restart of this process."""
    return Alive(status="ok")


@router.get(
    "/readyz",
    summary="Whether this service can answer requests",
    responses=refusals(HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[OPEN],
)
def get_readiness(desk: Desk) -> Alive:
    """Answer 200 while the database can be read, and else 503.

    Without a coordinator jobs are still shown, and accepted for later: `/health` has more.
    """
    database = _database(desk)
    if database.status != "ok":
        _LOG.warning(f"cannot serve: {database.detail}", action="not_ready", reason=database.detail)
        raise Problem(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "not-ready",
            "The database cannot be read: /health tells whoever may read why.",
        )
    return Alive(status="ok")


@router.get(
    "/version",
    summary="Versions of program, API and database schema, and where its data is",
    dependencies=[READ],
)
def get_version(desk: Desk, response: Response) -> Version:
    """Say which service this is."""
    response.headers["Cache-Control"] = "no-cache"
    return Version(
        app=desk.version,
        api=API_VERSION,
        schema_revision=desk.database.revision(),
        database=desk.database.kind,
        data_dir=str(desk.files.root),
        checkpoint_dir=str(desk.submitter.settings.checkpoint_dir),
    )


def _for_anybody(found: Health) -> Health:
    """Return no more than what is well: errors and paths are nobody's business."""
    checks = {name: Check(status=check.status, detail="") for name, check in found.checks}
    return found.model_copy(update={"version": None, "checks": Checks(**checks)})


def _database(desk: FrontDesk) -> Check:
    try:
        desk.database.check()
    except StoreError as error:
        return Check(status="degraded", detail=str(error))
    return Check(status="ok", detail="reachable")


def _coordinator(desk: FrontDesk) -> Check:
    try:
        absence = desk.coordinator.absence()
    except StoreError:
        absence = "not known while the database cannot be reached"
    return Check(status=_status(absence is None), detail=absence or "running")


def _disk(desk: FrontDesk) -> Check:
    root = desk.files.root
    try:
        usage, files = shutil.disk_usage(root), os.statvfs(root)
    except OSError as error:
        return Check(status="degraded", detail=f"{root} cannot be looked at ({error.strerror})")
    if is_nearly_full(usage.free, usage.total):
        left = f"only {usage.free >> 20} MiB are free on the disk of {root}"
    elif has_few_files_left(files.f_favail, files.f_files):
        left = f"there is room for only {files.f_favail} more files (inodes) on the disk of {root}"
    else:
        return Check(status="ok", detail=f"{usage.free >> 20} MiB are free")
    cure = "make room there, or delete old jobs (POST /jobs/purge)"
    return Check(status="degraded", detail=f"{left}: {cure}")


def _status(good: bool) -> Literal["ok", "degraded"]:  # noqa: FBT001  the value itself
    return "ok" if good else "degraded"
