"""Scripts of a household that wait for each other, and the group that they become."""

import errno
import os
import time
from collections.abc import Sequence
from socket import socket
from typing import Final

import muster.mesh
from muster.collectives.backend import MESSAGE, TIMEOUT_SECONDS, Data, Tag, Target
from muster.collectives.errors import Aborted, ChannelClosed, CollectiveError, Timeout
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import Connections, Endpoint, rendezvous
from muster.collectives.transports.tcp import TcpBackend
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.host.private import make_private
from muster.links.serving import listen
from muster.mesh.announce import Announcer
from muster.mesh.health import PRESETS
from muster.mesh.identity import ProcessKey, mesh_identity
from muster.mesh.network import Member, Network
from muster.mesh.secret import NoSecret, cluster_name, shared_key

PORTS: Final = range(52416, 52448)
MEETING_SECONDS: Final = 10.0
"""For the connections between members, once they know that they are a group."""
POLL_SECONDS: Final = 0.01


class PeerGone(ChannelClosed):
    """A member has ended, or does not answer any more."""

    def __init__(self, rank: int, name: str) -> None:
        super().__init__(rank)
        self.name = name
        self.args = (
            f"{name}, rank {rank}, is gone: call discover(after=backend) to go on with the others",
        )


class MeshBackend(TcpBackend):
    """The backend of a group that has met at home; ranks are in the order of nodes."""

    def __init__(
        self,
        own: Membership,
        connections: Connections,
        mesh: "Mesh",
        group: str,
        members: Sequence[Member],
    ) -> None:
        self.members = tuple(members)
        """By rank."""
        self.group = group
        self.mesh = mesh
        super().__init__(own, connections, on_wait=lambda: mesh.check(self.members))

    def exchange(
        self,
        outgoing: Sequence[tuple[int, Data]],
        incoming: Sequence[tuple[int, Target]],
        *,
        tag: Tag = MESSAGE,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        try:
            super().exchange(outgoing, incoming, tag=tag, timeout_seconds=timeout_seconds)
        except (ChannelClosed, Aborted) as error:
            raise self._named(error) from error

    def probe(self, tag: Tag = MESSAGE, *, timeout_seconds: float = TIMEOUT_SECONDS) -> int:
        try:
            return super().probe(tag, timeout_seconds=timeout_seconds)
        except ChannelClosed as error:
            raise self._named(error) from error

    def close(self) -> None:
        super().close()
        self.mesh.close()

    def _named(self, error: ChannelClosed | Aborted) -> CollectiveError:
        """Return the error with the name of the member that is gone, if one is."""
        if isinstance(error, PeerGone) or error.rank == self.rank:
            return error
        if isinstance(error, ChannelClosed):
            return PeerGone(error.rank, str(self.members[error.rank]))
        # Another rank has left the operation first, and says who is gone.
        for rank, member in enumerate(self.members):
            if member.process_id in error.reason:
                return PeerGone(rank, str(member))
        return error


class Mesh:
    """What a process has of its household: its links, and what announces it."""

    def __init__(self, preset: str) -> None:
        """Raises `NoSecret`, `UnusableDirectory`, `InvalidEnvironment` and OSError."""
        if preset not in PRESETS:
            raise NoSecret(f"there is no preset {preset!r}: use one of {', '.join(PRESETS)}")
        files = DataDir(ServiceSettings.read(os.environ, cores=1).data_dir)
        make_private(files.root)
        key = shared_key(os.environ, files.cluster_key)
        own = ProcessKey.make(cluster_name(os.environ), files.node_key)
        self.network = Network(mesh_identity(own, key), _listen(), PRESETS[preset])
        self.announcer = Announcer(self.network, own.claim)

    def meet(
        self, group: str, size: int | None, after: Sequence[Member], until: float
    ) -> MeshBackend:
        """Return the backend once the group is connected. Raises `Timeout`."""
        network = self.network
        while True:
            network.wait_for(group, size, [member.process_id for member in after])
            while (closed := network.formed()) is None:
                if time.monotonic() >= until:
                    raise self._timeout(group, size)
                time.sleep(POLL_SECONDS)
            try:
                members = network.members_of(closed)
                return self._connect(group, members, closed.token)
            except (CollectiveError, KeyError):
                # One has died meanwhile; the others begin again, as this process does.
                if time.monotonic() >= until:
                    raise

    def check(self, members: Sequence[Member]) -> None:
        """Raise `PeerGone` if one of them is gone."""
        if gone := self.network.gone:
            for rank, member in enumerate(members):
                if member.process_id in gone:
                    raise PeerGone(rank, str(member))

    def close(self) -> None:
        self.announcer.close()
        self.network.close()

    def _connect(self, group: str, members: list[Member], token: bytes) -> MeshBackend:
        ranks = [member.process_id for member in members]
        nodes = list(dict.fromkeys(member.node_id for member in members))
        own = Membership(
            rank=ranks.index(self.network.own_id),
            world_size=len(members),
            generation=0,
            token=token,
        )
        endpoints = [Endpoint(*member.address, nodes.index(member.node_id)) for member in members]
        listener = self.network.lend_listener()
        try:
            connections = rendezvous(
                own,
                endpoints[0][:2],
                endpoints=endpoints,
                listener=listener,
                timeout_seconds=MEETING_SECONDS,
                unreachable_seconds=MEETING_SECONDS,
                on_wait=lambda: self.check(members),
            )
        finally:
            self.network.listen()
        muster.mesh.last_discovered = MeshBackend(own, connections, self, group, members)
        return muster.mesh.last_discovered

    def _timeout(self, group: str, size: int | None) -> Timeout:
        network = self.network
        linked = ", ".join(map(str, network.members())) or "no one"
        problems = "".join(f"; {warning}" for warning in network.warnings)
        full = ", ".join(map(str, network.waits_with()))
        full = f"; a group of that name lives: {full}" if full else ""
        waited = "the others" if size is None else f"{size - 1} others"
        return Timeout(0, f"{waited} in the group {group!r}; linked: {linked}{full}{problems}")


def discover(
    peers: int | None = None,
    timeout_seconds: float = 30.0,
    *,
    group: str = "default",
    preset: str = "default",
    after: MeshBackend | None = None,
) -> MeshBackend:
    """Return the backend of this script and `peers` others of the household that wait as well.

    `group` keeps runs apart. With `after` the members of an earlier group that are alive, and
    scripts that wait now, meet anew under its name; that backend is closed.
    """
    until = time.monotonic() + timeout_seconds
    if after is not None:
        mesh, group, members = after.mesh, after.group, after.members
        TcpBackend.close(after)
        return mesh.meet(group, None, members, until)
    mesh = Mesh(preset)
    try:
        return mesh.meet(group, 1 + (peers or 1), [], until)
    except BaseException:
        mesh.close()
        raise


def _listen() -> socket:
    """Return a socket at the first free port. Raises OSError."""
    for port in PORTS:
        try:
            return listen("0.0.0.0", port)  # noqa: S104  every connection has to prove the secret
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == PORTS[-1]:
                raise
    raise AssertionError
