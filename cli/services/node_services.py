"""API and coordinator of the node that leads, warm on every node that may lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from cli.output import say
from cli.services.processes import ServicePair
from cli.services.record import is_serving
from cli.services.signals import END_SIGNALS
from muster.contracts.settings.services import DEFAULT_HOST, TLS_CERTFILE, local_url
from muster.host.ports import free_port
from muster.mesh.roster import Role

POLL_SECONDS: Final = 0.05

CHECK_SECONDS: Final = 1.0
"""Between looks at the thread of the mesh, and at services that have ended by themselves."""

PAUSE_SECONDS: Final = 2.0
"""Between attempts to start services that give up, as over a database that is damaged."""


def node_environment(environ: Mapping[str, str], nodes_file: str) -> dict[str, str]:
    """Return the environment of the services of a node, whose API only the relay reaches."""
    left_out = {TLS_CERTFILE, "MUSTER_TLS_KEYFILE"}  # links are sealed
    return {
        **{name: value for name, value in environ.items() if name not in left_out},
        "MUSTER_NODES": nodes_file,
        "MUSTER_HOST": DEFAULT_HOST,
        "MUSTER_PORT": str(free_port()),
    }


class NodeServices:
    """What a node does with its services, from its start to its end."""

    def __init__(self, environ: Mapping[str, str], url: str) -> None:
        """`url` is where people reach the cluster on this machine."""
        self._environ = environ
        self._url = url
        self._pair: ServicePair | None = None
        self._role = Role.NONE
        self._changed = asyncio.Event()
        self._announcement: asyncio.Task[None] | None = None
        self._is_ending = False
        self._loop = asyncio.get_running_loop()

    @property
    def port(self) -> int:
        """Where the API listens, while this node leads."""
        return int(self._environ["MUSTER_PORT"])

    def set_role(self, role: Role) -> None:
        """Take what the services are to do; for other threads."""

        def take() -> None:
            self._role = role
            self._changed.set()

        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(take)

    async def run(self, has_failed: Callable[[], bool]) -> None:
        """Do what each role asks for, until a signal, or until the thread of the mesh fails."""
        for number in END_SIGNALS:
            self._loop.add_signal_handler(number, self._interrupt)
        while not (self._is_ending or has_failed()):
            await self._follow_role()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
        if self._pair is not None:
            say("ranks checkpoint and exit … (Ctrl-C again kills the services at once)")
            await self._pair.end_coordinator()
            await self._pair.end_api()

    async def _follow_role(self) -> None:
        pair, role = self._pair, self._role
        if pair is not None and (pair.api.done() or pair.coordinator.done()):
            say(f"the services have ended by themselves; they start again in {PAUSE_SECONDS:g} s")
            await self._hand_over(pair)
            await asyncio.sleep(PAUSE_SECONDS)
        elif pair is not None and (role is Role.NONE or (pair.has_begun and role is Role.STANDBY)):
            await self._hand_over(pair)
        if role is not Role.NONE and self._pair is None:
            self._pair = ServicePair(self._environ, is_standby=True)
        if role is Role.LEADS and self._pair is not None and not self._pair.has_begun:
            self._pair.start()
            self._announcement = asyncio.create_task(self._announce(self._pair))

    async def _hand_over(self, pair: ServicePair) -> None:
        """End the services; agents and ranks run on."""
        self._pair = None
        if self._announcement is not None:
            self._announcement.cancel()
        await pair.hand_over()

    async def _announce(self, pair: ServicePair) -> None:
        url = local_url(self._environ)
        # The readiness of another process: there is no event to wait for.
        while not await asyncio.to_thread(is_serving, url):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        pair.mark_served()
        say(f"this node serves the cluster, at {self._url}")

    def _interrupt(self) -> None:
        if self._is_ending and self._pair is not None:
            self._pair.kill()
        self._is_ending = True
        self._changed.set()
