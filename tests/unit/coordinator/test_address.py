"""Where the coordinator listens: written down for as long as it is the one to say so."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from coordinator import address
from coordinator.address import keep_published
from muster.contracts.agent import CoordinatorAddress
from muster.processes import myself
from muster.published_address import published_address

OURS = CoordinatorAddress(host="here", port=1, process=myself())


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "LOOK_SECONDS", 0.001)


def test_an_address_that_was_removed_is_published_again(tmp_path: Path) -> None:
    file = tmp_path / "data" / "address.json"
    asked = []

    async def is_in_office() -> bool:
        asked.append(published_address(file))
        return True

    async def publish_and_lose() -> None:
        publishing = asyncio.ensure_future(keep_published(OURS, file, is_in_office))
        for _ in range(2):
            while published_address(file) is None:  # noqa: ASYNC110  a file: there is no event
                await asyncio.sleep(0.001)
            file.unlink()
            file.parent.rmdir()
        while len(asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        publishing.cancel()
        with suppress(asyncio.CancelledError):
            await publishing

    asyncio.run(publish_and_lose())
    assert asked[:2] == [None, None]
    assert published_address(file) == OURS


def test_who_is_out_of_office_leaves_the_place_to_others(tmp_path: Path) -> None:
    file = tmp_path / "address.json"

    async def is_in_office() -> bool:
        return False

    async def publish_and_lose() -> None:
        publishing = asyncio.ensure_future(keep_published(OURS, file, is_in_office))
        while not file.exists():  # noqa: ASYNC110  a file: there is no event
            await asyncio.sleep(0.001)
        file.unlink()
        await publishing

    asyncio.run(publish_and_lose())
    assert not file.exists()
