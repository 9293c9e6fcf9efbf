"""Nodes of a household as hosts: an order goes over a link of its own to the node there.

That node runs `worker.attach` for it, see `muster.mesh.orders`: it does what SSH does elsewhere.
"""

import asyncio
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from coordinator.launchers.remote_shell import RemoteShell
from muster.cluster.members import MemberNode, read_members
from muster.contracts.errors import AuthenticationFailed, MusterError, WireError
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.settings.paths import DataDir

if TYPE_CHECKING:
    from muster.mesh.identity import MeshIdentity


class MeshNodes:
    """The nodes as their file says at the moment, and who this process is for them."""

    def __init__(self, file: Path, environ: Mapping[str, str], data: DataDir) -> None:
        self._file = file
        self._environ = environ
        self.data = data
        self.home = os.path.expanduser("~")  # noqa: PTH111  a Path raises where there is none

    def find(self, node_id: str) -> MemberNode | None:
        members = read_members(self._file)
        return None if members is None else members.find(node_id)

    @cached_property
    def identity(self) -> "MeshIdentity":
        """Raises `NoSecret` and `UnusableDirectory`."""
        # Imported here: cryptography takes long to load, and others have no household.
        from muster.mesh.identity import mesh_identity  # noqa: PLC0415
        from muster.mesh.secret import cluster_name, shared_key  # noqa: PLC0415

        secret = shared_key(self._environ, self.data.cluster_key)
        return mesh_identity(cluster_name(self._environ), self.data.node_key, secret)


class MeshConnection:
    """The way to one node. There is nothing to keep open: each order has a link of its own."""

    def __init__(self, node_id: str, nodes: MeshNodes, reached_at: CoordinatorAddress) -> None:
        """`reached_at` is where agents reach us, but for the host: each node has its own way."""
        self._node_id = node_id
        self._nodes = nodes
        self._place: tuple[str, int] | None = None
        self.by_hand = "muster mesh"
        self.address = reached_at

    async def open(self) -> str:
        """Read where the node is, and where it reaches us; return why no link can be made."""
        try:
            await asyncio.to_thread(lambda: self._nodes.identity)
        except MusterError as error:
            return str(error)
        node = self._nodes.find(self._node_id)
        if node is None or node.address is None:
            return "it is not among the nodes of the household any more"
        self._place = node.address
        self.by_hand = shlex.join(["muster", "mesh", "doctor", node.name])
        if node.leader_host != self.address.host:
            # A later number: agents follow the newest address.
            epoch, way = self.address.number
            self.address = replace(self.address, host=node.leader_host, number=(epoch, way + 1))
        return ""

    def shell(self, command: Sequence[str]) -> RemoteShell:  # noqa: ARG002  the node has its own
        """Return a shell at the place that `open` has read."""
        assert self._place is not None  # noqa: S101  it was opened
        return LinkShell(self._place, self._nodes, self.address.number[0])

    def close(self) -> None:
        """There is nothing to close."""


class LinkShell(RemoteShell):
    """Over a link to a node; a task carries the bytes."""

    def __init__(self, place: tuple[str, int], nodes: MeshNodes, epoch: int) -> None:
        super().__init__()
        self._error = ""
        self._carrying = asyncio.get_running_loop().create_task(self._carry(place, nodes, epoch))

    def errors(self) -> str:
        return self._error

    def close(self) -> None:
        super().close()
        self._carrying.cancel()

    async def _carry(self, place: tuple[str, int], nodes: MeshNodes, epoch: int) -> None:
        # Imported here: as the identity, which exists by now.
        from muster.mesh.messages import Attach  # noqa: PLC0415
        from muster.mesh.streams import open_stream, pump  # noqa: PLC0415

        first = Attach(data_dir=str(nodes.data.root), home=nodes.home, epoch=epoch)
        with closing(self._theirs):
            try:
                link = await open_stream(place, nodes.identity, first)
                with closing(link.writer):
                    reader, writer = await asyncio.open_connection(sock=self._theirs)
                    with closing(writer):
                        await pump(link, reader, writer)
            except (OSError, AuthenticationFailed, WireError) as error:
                self._error = f"{place[0]} port {place[1]}: {error}"
