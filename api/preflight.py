"""What a service with these settings would refuse, told before anything is started.

Nothing is changed by looking: a database that is not there is not made. `muster up` asks before it
starts a service, `muster validate` at any time.
"""

import socket
from typing import TYPE_CHECKING

from api.exposure import refuse_exposure, refuse_lockout
from api.tls_files import check_certificate
from muster.contracts.environ import DoorSettings, ServiceSettings
from muster.ports import NotHere

if TYPE_CHECKING:
    from store.inspection import Inspection


def refuse_door(settings: ServiceSettings, door: DoorSettings) -> str:
    """Return the address that a service would listen on.

    Raises `InvalidCertificate`, `LockedOut` and `Exposed` as it would itself, `NotHere` for a host
    that has no address, and `StoreError` where nobody can look whether there is a token.
    """
    if door.tls_certfile is not None:
        check_certificate(door.tls_certfile, door.tls_keyfile)
    try:
        address = str(socket.getaddrinfo(settings.host, None)[0][4][0])
    except OSError as error:
        raise NotHere(settings.host, error) from error

    def is_any_token() -> bool:
        from store.inspection import is_any_token  # noqa: PLC0415  brings in SQLAlchemy

        inspect_database(settings.database_url)  # one that is out of reach is another fault
        return is_any_token(settings.database_url)

    refuse_lockout(door, is_any_token)
    refuse_exposure(settings.host, address, door, is_any_token)
    return address


def inspect_database(url: str) -> "Inspection":
    """Return which schema a database has; raises `StoreError` if it cannot be read."""
    from store.inspection import inspect  # noqa: PLC0415  brings in SQLAlchemy

    return inspect(url)
