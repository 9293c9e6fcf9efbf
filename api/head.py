"""HEAD for every path that takes GET: the same headers, and no body."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadAsGet:
    """ASGI middleware: routes see a GET, and whatever they say after their headers is dropped."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered = asyncio.Event()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
            elif not answered.is_set():
                answered.set()
                await send({"type": "http.response.body"})

        async def receiving() -> Message:
            # There is no body; and who was answered listens no more, which ends a stream.
            await answered.wait()
            return {"type": "http.disconnect"}

        await self._app({**scope, "method": "GET"}, receiving, sending)
