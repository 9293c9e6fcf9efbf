"""API and coordinator of the node that leads, warm on every node that may lead."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import inf
from typing import BinaryIO, Final

from cli.output import say
from cli.services.cluster_secrets import ClusterSecrets
from cli.services.processes import Service, ServicePair
from cli.services.record import is_serving
from cli.services.signals import ONE_REQUEST_SECONDS, call_at_signals
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import DEFAULT_HOST, TLS_CERTFILE, local_url
from muster.host.ports import free_port
from muster.host.processes import module_command
from muster.mesh.founding import Founding
from muster.mesh.network import Network
from muster.mesh.node import Node
from muster.mesh.orders import serve_orders
from muster.mesh.relay import ApiRelay, Target
from muster.mesh.roster import Role, Roster
from muster.mesh.rows import serve_rows
from muster.runtime.secrets import SecretStore

POLL_SECONDS: Final = 0.05

CHECK_SECONDS: Final = 1.0
"""Between looks at the thread of the mesh, and at services that have ended by themselves."""

PAUSE_SECONDS: Final = 2.0
"""Between attempts to start services that give up, as over a database that is damaged."""

NOTICE_SECONDS: Final = 1.5
"""Until no rank is placed here any more, so that those which end now are started elsewhere."""

SUCCESSOR_SECONDS: Final = 15.0
"""For the election of another node that leads."""

DRAIN_SECONDS: Final = 60.0
"""For the last checkpoints of ranks."""


def node_environment(environ: Mapping[str, str], files: DataDir) -> dict[str, str]:
    """Return the environment of the services of a node, whose API only the relay reaches."""
    left_out = {TLS_CERTFILE, "MUSTER_TLS_KEYFILE"}  # links are sealed
    return {
        **{name: value for name, value in environ.items() if name not in left_out},
        "MUSTER_NODES": str(files.nodes),
        "MUSTER_HOST": DEFAULT_HOST,
        "MUSTER_PORT": str(free_port()),
    }


class NodeServices:
    """What a node does with its services, from its start to its end."""

    def __init__(
        self,
        environ: Mapping[str, str],
        url: str,
        output: BinaryIO | None = None,
        *,
        files: DataDir | None = None,
    ) -> None:
        """`url` is where people reach the cluster on this machine; services write to `output`.

        With `files` other nodes get the rows of the database there.
        """
        self._environ = environ
        self._files = files
        self.has_copies = files is not None
        """Whether other nodes get the rows."""
        self._rows: Service | None = None
        self._sending: asyncio.Task[int] | None = None
        self.is_writing = False
        """Whether the services of this node use the database."""
        self.is_copying = False
        """Whether another process does, which may put another file in its place."""
        self._output = output
        self._url = url
        self._pair: ServicePair | None = None
        self._role = Role.NONE
        self._changed = asyncio.Event()
        self._announcement: asyncio.Task[None] | None = None
        self._interrupted_at = inf
        """When the first signal has come."""
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

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Do what each role asks for, until a signal or `is_over`; then call `end`."""
        call_at_signals(self._interrupt)
        while not (self._interrupted_at < inf or is_over()):
            await self._follow_role()
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await self._changed.wait()
            self._changed.clear()

    async def end(self) -> None:
        """Let ranks checkpoint and exit, and end the services."""
        if self._pair is not None:
            if self._interrupted_at < inf:
                say("ranks checkpoint and exit … (Ctrl-C again kills the services at once)")
            await self._pair.end_coordinator()
            await self._pair.end_api()
        await self._end_rows()

    async def hand_over(self) -> None:
        """End the services, while agents and ranks run on, as after `run`."""
        if self._pair is not None:
            await self._hand_over(self._pair)

    async def _follow_role(self) -> None:
        pair, role = self._pair, self._role
        if pair is not None and (pair.api.done() or pair.coordinator.done()):
            log = f", see {self._output.name}" if self._output else ""
            say(f"the services have ended by themselves{log}; again in {PAUSE_SECONDS:g} s")
            await self._hand_over(pair)
            await asyncio.sleep(PAUSE_SECONDS)
        elif pair is not None and (role is Role.NONE or (pair.has_begun and role is Role.STANDBY)):
            await self._hand_over(pair)
        if role is not Role.NONE and self._pair is None:
            self._pair = ServicePair(self._environ, self._output, is_standby=True)
        pair = self._pair
        if role is Role.LEADS and pair and not (pair.has_begun or self.is_copying):
            pair.start()
            self._start_rows()
            self._announcement = asyncio.create_task(self._announce(pair))

    async def _hand_over(self, pair: ServicePair) -> None:
        """End the services; agents and ranks run on."""
        self._pair = None
        if self._announcement is not None:
            self._announcement.cancel()
        await pair.hand_over()
        await self._end_rows()

    def _start_rows(self) -> None:
        """Send the rows of the database to other nodes from now on."""
        self.is_writing = True
        if (files := self._files) is not None:
            words = ["lead", str(files.database), str(files.replication_socket), str(files.nodes)]
            command = module_command("database.replication", *words)
            self._rows = Service("sender of rows", command, self._environ, self._output)
            self._rows.has_served = True
            self._sending = asyncio.create_task(self._rows.run())

    async def _end_rows(self) -> None:
        if self._rows is not None and self._sending is not None:
            self._rows.end(signal.SIGTERM)
            await self._sending
        self._rows, self.is_writing = None, False

    async def _announce(self, pair: ServicePair) -> None:
        url = local_url(self._environ)
        # The readiness of another process: there is no event to wait for.
        while not await asyncio.to_thread(is_serving, url):  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        pair.mark_served()
        say(f"this node serves the cluster, at {self._url}")

    def _interrupt(self) -> None:
        now = self._loop.time()
        if self._pair is not None and now >= self._interrupted_at + ONE_REQUEST_SECONDS:
            self._pair.kill()
        self._interrupted_at = min(now, self._interrupted_at)
        self._changed.set()


def take_part(
    network: Network,
    files: DataDir,
    founding: Founding,
    services: NodeServices,
    listening: socket.socket,
    slots: int,
) -> Node:
    """Make this process the node of its machine in a cluster.

    `listening` is where people reach the cluster here; `slots` is how many ranks may run.
    """
    part = Node(network, files.election, say, founding=founding, slots=slots)
    part.is_copy_known = not services.has_copies
    Roster(network, part, files.nodes, services.set_role, has_copies=services.has_copies)
    serve_orders(network, files.root, lambda node: node == part.master)
    ClusterSecrets(network, part, SecretStore(files.secrets))
    serve_rows(network, files.replication_socket, lambda: part.leads)
    ApiRelay(network, listening, lambda: _target(network, part, services.port))
    return part


def _target(network: Network, part: Node, own_port: int) -> Target:
    """Return where the API of the cluster is, or why there is none."""
    if part.leads:
        return own_port
    peer = network.peers.get(part.process_of(part.master or ""))
    if peer is not None:
        return peer.member
    if part.cluster is None:
        return (
            "this machine belongs to no cluster yet: start muster node where the secret was made, "
            "or muster node --found on one machine; if it runs there: muster mesh doctor"
        )
    return "no node leads the cluster now: wait some seconds, or see muster mesh"


async def hand_over(network: Network, part: Node, services: NodeServices, files: DataDir) -> None:
    """Have another node lead, after `drain`, while the ranks of other machines run on."""
    say("another node takes over the jobs …")
    network.do(part.resign)
    await services.hand_over()
    await _end_agents(files)  # which our coordinator may have started after the others ended
    until = time.monotonic() + SUCCESSOR_SECONDS
    # Of the thread of the network: there is no event to wait for.
    while (  # noqa: ASYNC110
        part.master is None and has_successor(network) and time.monotonic() < until
    ):
        await asyncio.sleep(POLL_SECONDS)


def has_successor(network: Network) -> bool:
    """Whether another node has the rows, and stays."""
    stay = [hello.copy for _, hello in network.hellos() if not hello.is_leaving]
    return any(copy is not None for copy in stay)


async def drain(network: Network, files: DataDir) -> None:
    """Have the ranks of this machine go on elsewhere."""
    say("the ranks of this machine save, and go on elsewhere …")
    network.do(lambda: network.say(is_leaving=True))
    await asyncio.sleep(NOTICE_SECONDS)
    await _end_agents(files)


async def _end_agents(files: DataDir) -> None:
    import worker.attach  # noqa: PLC0415  slow

    left = await asyncio.to_thread(worker.attach.drain, files, DRAIN_SECONDS)
    if left:
        say(f"{left} agents have not ended within {DRAIN_SECONDS:g} s: their ranks run on")
