"""MUSTER_REQUIRE_TOKEN: whoever starts the service needs a token for it as well.

Only a token of scope admin makes or ends others. Where nobody has one, nobody can make it either
while the service runs so, and whoever meets that late has to end it: so it is said at the start.
"""

from typing import Final

from muster.contracts.environ import DoorSettings, ServiceSettings
from muster.contracts.token import WAY_TO_ADMIN, Scope
from muster.remarks import remark

NO_ADMIN: Final = (
    "MUSTER_REQUIRE_TOKEN is set and no token of scope admin is valid, so nobody can make or "
    "revoke one"
)


def warn_of_no_admin(settings: ServiceSettings, door: DoorSettings) -> None:
    """Tell whoever starts a service that nobody will be able to say who may come in."""
    if is_without_admin(settings, door):
        remark(f"muster: {NO_ADMIN}: {WAY_TO_ADMIN}")


def is_without_admin(settings: ServiceSettings, door: DoorSettings) -> bool:
    """Whether everybody needs a token, and no valid one has the scope admin."""
    if not door.require_token or door.token_sha256 is not None:
        return False
    from store.inspection import is_any_token  # noqa: PLC0415  brings in SQLAlchemy

    return not is_any_token(settings.database_url, Scope.ADMIN)
