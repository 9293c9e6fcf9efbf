"""Where the present coordinator listens, as it has published it; anybody may read that."""

from pathlib import Path

import msgspec

from muster.contracts.agent import CoordinatorAddress


def published_address(file: Path) -> CoordinatorAddress | None:
    """Return what the file says; None if there is none, or nothing that means an address."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=CoordinatorAddress)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
