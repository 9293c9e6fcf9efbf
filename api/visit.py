"""A stream ends when its token does: whoever may not come in any more is taken for gone.

A request is let in once, but a stream may be open for days. So whoever showed a token is looked at
again while the application waits to hear of them; it then hears that they have left.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.types import Message, Receive, Send

RECHECK_SECONDS: Final = 10.0


class Visit:
    """One request and its answer, for as long as `is_known` says yes.

    The application is given `receive` and `send`; `end` is for whoever called it, when it is done.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        is_known: Callable[[], Awaitable[bool]],
        recheck_seconds: float = RECHECK_SECONDS,
    ) -> None:
        self._receive = receive
        self._send = send
        self._is_known = is_known
        self._recheck_seconds = recheck_seconds
        self._heard: asyncio.Task[Message] | None = None
        """What the client sends next, or will."""
        self._is_cut = False
        self._is_unfinished = False

    async def receive(self) -> Message:
        """Return what the client sends next, or that it has left.

        Whoever gives up waiting loses nothing: some only ask whether there is anything, and are
        cancelled as soon as they would have to wait. What has come by then is there at once.
        """
        if self._heard is None:
            self._heard = asyncio.ensure_future(self._hear())
        if not self._heard.done():
            await asyncio.wait({self._heard})
        heard, self._heard = self._heard, None
        return heard.result()

    async def send(self, message: Message) -> None:
        self._is_unfinished = message["type"] == "http.response.start" or message.get(
            "more_body", False
        )
        await self._send(message)

    async def end(self) -> None:
        """Finish an answer that was cut off; any other is the application's own to finish."""
        if self._heard is not None:
            self._heard.cancel()
        if self._is_cut and self._is_unfinished:
            await self.send({"type": "http.response.body"})

    async def _hear(self) -> Message:
        heard = asyncio.ensure_future(self._receive())
        try:
            while not (await asyncio.wait({heard}, timeout=self._recheck_seconds))[0]:
                if not await self._is_known():
                    self._is_cut = True
                    return {"type": "http.disconnect"}
            return heard.result()
        finally:
            heard.cancel()
