"""GET /health: is this service serving, and can it reach what it needs?"""

from typing import Literal

from fastapi import APIRouter

from api.access import OPEN
from api.desk import Desk, FrontDesk
from api.schemas import Check, Checks, Health
from store.errors import StoreError

router = APIRouter(tags=["service"])


@router.head("/health", include_in_schema=False, dependencies=[OPEN])
@router.get("/health", summary="Liveness, version, database and coordinator", dependencies=[OPEN])
def health(desk: Desk) -> Health:
    """Answer 200 as long as this process serves; `status` says whether everything is there."""
    database = _database(desk)
    coordinator = _coordinator(desk)
    return Health(
        status=_status(database.status == coordinator.status == "ok"),
        version=desk.version,
        uptime_seconds=desk.uptime_seconds(),
        checks=Checks(database=database, coordinator=coordinator),
    )


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


def _status(good: bool) -> Literal["ok", "degraded"]:  # noqa: FBT001  the value itself
    return "ok" if good else "degraded"
