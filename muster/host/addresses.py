"""The file that tells the processes of a host where they reach the coordinator."""

import socket
from contextlib import suppress
from pathlib import Path

import msgspec

from muster.contracts.messages.assignment import CoordinatorAddress
from muster.host.files import replace_private


def read_coordinator_address(file: Path) -> CoordinatorAddress | None:
    """Return the address in the file of this host; None without a valid one."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=CoordinatorAddress)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def publish_address(address: CoordinatorAddress, path: Path) -> None:
    """Replace the address file of this host; no agent survives a power cut. Raises OSError.

    The order of a coordinator that was replaced, or of its last connection, may come late: a newer
    address is kept if something listens there. Epochs begin lower once a database was restored.
    """
    known = read_coordinator_address(path)
    if known is not None and known.number > address.number and _is_listening(known):
        raise OSError(
            f"{path} names a newer coordinator: if another installation has its files there, "
            "give this one a MUSTER_DATA_DIR of its own"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_private(path, msgspec.json.encode(address))


def _is_listening(address: CoordinatorAddress) -> bool:
    with suppress(OSError):
        socket.create_connection(address.place, timeout=1.0).close()
        return True
    return False
