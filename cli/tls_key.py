"""The key of TLS, which is to be the service's alone."""

import shlex
import stat
from contextlib import suppress
from pathlib import Path

from api.tls_files import holds_key
from muster.contracts.environ import DoorSettings
from muster.remarks import remark


def warn_of_open_key(door: DoorSettings) -> None:
    """Tell whoever starts a service of a key that others may read."""
    key = key_open_to_all(door)
    if key:
        remark(f"muster: {key} is the key of TLS, and others may read it: {only_for_oneself(key)}")


def only_for_oneself(key: Path) -> str:
    """Return what to type."""
    return f"chmod 600 {shlex.quote(str(key))}"


def key_open_to_all(door: DoorSettings) -> Path | None:
    """Return the file of the key, if every user of this machine may open it.

    Its group may: that is how a machine lends one key to several services.
    """
    key = door.tls_keyfile or door.tls_certfile
    with suppress(OSError):  # what cannot be looked at is another fault
        if key is not None and key.stat().st_mode & stat.S_IRWXO and holds_key(key):
            return key
    return None
