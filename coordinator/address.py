"""The file that tells agents where the present coordinator listens, replaced atomically."""

import os
from pathlib import Path

import msgspec

from muster.contracts.agent import CoordinatorAddress


def publish(address: CoordinatorAddress, path: Path) -> None:
    """Replace the file; a reader sees the old address or the new one, whole.

    It need not survive a power cut: no agent does either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch(mode=0o600)
    temporary.write_bytes(msgspec.json.encode(address))
    temporary.replace(path)
