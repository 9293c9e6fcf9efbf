"""The file that tells agents where the present coordinator listens, replaced atomically."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from muster.contracts.agent import CoordinatorAddress

LOOK_SECONDS: Final = 2.0


def publish(address: CoordinatorAddress, path: Path) -> None:
    """Replace the file; a reader sees the old address or the new one, whole.

    It need not survive a power cut: no agent does either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch(mode=0o600)
    temporary.write_bytes(msgspec.json.encode(address))
    temporary.replace(path)


async def keep_published(
    address: CoordinatorAddress, path: Path, is_in_office: Callable[[], Awaitable[bool]]
) -> None:
    """Publish, and publish again whenever somebody has removed the file; until cancelled.

    To be begun in office. Later on, the place of the file may have become another coordinator's,
    of other data: so `is_in_office` is asked first, which returns once that can be said.
    """
    is_published = _try_to_publish(address, path)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if not is_published or not path.exists():  # noqa: ASYNC240  one stat of a local file
            if not await is_in_office():
                return
            is_published = _try_to_publish(address, path)


def _try_to_publish(address: CoordinatorAddress, path: Path) -> bool:
    with suppress(OSError):  # a full disk may have room again
        publish(address, path)
        return True
    return False
