"""Whoever asks for many searches waits for themselves, and nobody else for them."""

import asyncio
import threading

from anyio.to_thread import run_sync

from api.searches import AT_ONCE, AT_ONCE_OF_ONE, Searches

DEADLINE_SECONDS = 20.0


class Library:
    """Finds nothing until it is told to; counts who is searching."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._is_open = False
        self.searching = 0

    def search(self) -> str:
        with self._change:
            self.searching += 1
            self._change.notify_all()
            assert self._change.wait_for(lambda: self._is_open, DEADLINE_SECONDS)
        return "found"

    def await_searching(self, count: int) -> None:
        with self._change:
            assert self._change.wait_for(lambda: self.searching == count, DEADLINE_SECONDS)

    def open(self) -> None:
        with self._change:
            self._is_open = True
            self._change.notify_all()


def test_one_client_takes_no_turn_of_another_and_no_thread_of_the_routes() -> None:
    async def ask() -> list[str]:
        searches, library = Searches(), Library()
        asked = [
            asyncio.ensure_future(searches.run(client, library.search))
            for client in ["greedy"] * 50 + ["modest"] * AT_ONCE_OF_ONE + ["late"]
        ]
        await run_sync(library.await_searching, 2 * AT_ONCE_OF_ONE)
        assert library.searching == AT_ONCE
        assert await run_sync(lambda: "a route") == "a route"
        library.open()
        return await asyncio.gather(*asked)

    assert asyncio.run(ask()) == ["found"] * 53
