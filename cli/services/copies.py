"""The copy of the cluster's rows on this machine, while another node leads."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from cli.output import say
from cli.services.node_services import NodeServices
from muster.contracts.position import Position
from muster.host.processes import module_command
from muster.mesh.identity import Member
from muster.mesh.messages import Copy
from muster.mesh.network import Network
from muster.mesh.node import Node
from muster.mesh.rows import follow_rows

POLL_SECONDS: Final = 0.1

PAUSE_SECONDS: Final = 1.0
"""After a copy that ended at once."""


class RowCopy:
    """Keeps a copy of the database of the node that leads, with a process of its own."""

    def __init__(
        self, network: Network, part: Node, database: Path, services: NodeServices
    ) -> None:
        """Either the `services` of this node use the database, or a process keeps the copy."""
        self._network = network
        self._part = part
        self._database = database
        self._services = services

    async def run(self) -> None:
        """Follow each node that leads in turn, and say what this one has; until cancelled."""
        self._say(await _position(self._database))
        while True:
            await asyncio.sleep(POLL_SECONDS)
            copy = self._network.hello.copy
            if self._services.is_writing:
                continue
            if (leader := self._leader()) is not None:
                await self._follow(leader)
                await asyncio.sleep(PAUSE_SECONDS)
            elif copy is not None and copy.is_live:  # this node has led
                self._say(await _position(self._database))

    async def end(self, running: asyncio.Task[None]) -> None:
        """End `run`."""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def _leader(self) -> Member | None:
        """Return the node that leads, if it is another one and linked."""
        peer = self._network.peers.get(self._part.process_of(self._part.master or ""))
        return None if peer is None or self._part.leads else peer.member

    async def _follow(self, leader: Member) -> None:
        """Keep the copy until another node leads, or the process ends, which executes all."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *module_command("database.replication", "follow", str(self._database)),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        self._services.is_copying = True
        with closing(ours.dup()) as end:
            follow_rows(self._network, leader.address, ours)
            reading = asyncio.create_task(self._read(process))
            try:
                while not reading.done() and self._leader() == leader:
                    await asyncio.wait([reading], timeout=POLL_SECONDS)
            finally:
                end.shutdown(socket.SHUT_RDWR)
                await reading
                await process.wait()
                self._services.is_copying = False

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None  # noqa: S101  it is a pipe
        last: Position | None = None
        while line := await process.stderr.readline():
            try:
                last = msgspec.json.decode(line, type=Position)
            except msgspec.MsgspecError:
                say(line.decode(errors="replace").rstrip())
            else:
                if last.is_current:
                    self._say(last)
        self._say(last)

    def _say(self, position: Position | None) -> None:
        """Say to all nodes what this one has."""
        copy = None
        if position is not None and position.may_lead:
            copy = Copy(
                majority=(position.majority_epoch, position.majority_number),
                newest=(position.epoch, position.number),
                is_live=position.is_current,
            )

        def take() -> None:
            self._part.is_copy_known = True
            self._network.say(copy=copy)

        self._network.do(take)


async def _position(database: Path) -> Position | None:
    """Return what a database holds that no process uses."""
    process = await asyncio.create_subprocess_exec(
        *module_command("database.replication", "position", str(database)),
        stdout=subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    return msgspec.json.decode(printed, type=Position | None) if printed else None
