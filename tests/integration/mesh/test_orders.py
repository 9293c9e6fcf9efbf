"""What the node of a machine does with orders of the machine that leads."""

import asyncio
from pathlib import Path

import pytest

from coordinator.launchers.launcher import NotStarted
from tests.support.households import household


def test_an_order_of_an_earlier_coordinator_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        with household(tmp_path) as home:
            assert (await home.launcher(epoch=2).probe()).facts is not None
            with pytest.raises(NotStarted, match="a later coordinator"):
                await home.launcher(epoch=1).probe()

    asyncio.run(check())
