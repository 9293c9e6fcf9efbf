"""Scripts of a household that wait for each other, and the group that they become."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from math import inf
from socket import socket
from typing import Final

import muster.mesh
from muster.collectives.backend import (
    MESSAGE,
    ON_WAIT_SECONDS,
    TIMEOUT_SECONDS,
    Data,
    Tag,
    Target,
)
from muster.collectives.errors import Aborted, ChannelClosed, CollectiveError, Timeout, Unsupported
from muster.collectives.transports.handshake import Membership
from muster.collectives.transports.rendezvous import Connections, Endpoint, rendezvous
from muster.collectives.transports.tcp import DEFAULT_PORT, TcpBackend, listed
from muster.contracts.errors import printable
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.host.private import make_private
from muster.host.processes import since_boot
from muster.links.serving import listen
from muster.mesh.announce import Announcer
from muster.mesh.forming import Closed
from muster.mesh.gathering import Gathering
from muster.mesh.health import PRESETS
from muster.mesh.identity import Member, mesh_identity
from muster.mesh.network import NAME_LIMIT, Network
from muster.mesh.secret import cluster_name, shared_key

PORTS: Final = range(DEFAULT_PORT, DEFAULT_PORT + 32)
NOTICE_SECONDS: Final = 3.0
"""After which a script says that it waits."""
HEARD_LIMIT: Final = 8
"""How many of those that are announced an error names."""
MEETING_SECONDS: Final = 10.0
"""The least time for the connections between members, once they know that they are a group."""


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
        mesh: "Mesh | None",
        group: str,
        members: Sequence[Member],
    ) -> None:
        self.members = tuple(members)
        """By rank."""
        self.group = group
        self.mesh = mesh
        """None for a list of addresses: then a connection that ends shows that a member is gone."""
        on_wait = (
            (lambda: None) if mesh is None else partial(mesh.check, self.members, since_boot())
        )
        super().__init__(own, connections, on_wait=on_wait)

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

    def counters(self) -> dict[str, float]:
        return super().counters() | (self.mesh.network.counters() if self.mesh else {})

    def close(self) -> None:
        super().close()
        if self.mesh and self.mesh.backend is self:  # not one that has met anew meanwhile
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
                # If this rank is the one, the two cannot reach each other: that one is gone for it.
                lost = error.rank if rank == self.rank else rank
                return PeerGone(lost, str(self.members[lost]))
        return error


class Mesh:
    """What a process has of its household: its links, and what announces it."""

    def __init__(self, preset: str, environ: Mapping[str, str] = os.environ) -> None:
        """Raises `NoSecret`, `UnusableDirectory`, `InvalidEnvironment` and OSError."""
        if preset not in PRESETS:
            raise Unsupported(f"there is no preset {preset!r}: use one of {', '.join(PRESETS)}")
        files = DataDir(ServiceSettings.read(environ, cores=1).data_dir)
        key = shared_key(environ, files.cluster_key)
        make_private(files.root)  # after it has been seen who could read the secret
        own = mesh_identity(cluster_name(environ), files.node_key, key)
        self.network = Network(own, _listen(), PRESETS[preset])
        self.gathering = Gathering(self.network)
        self.announcer = Announcer(self.network)
        self.backend: MeshBackend | None = None
        """Of the group that has met last."""
        self.is_closed = False

    def meet(
        self, group: str, size: int | None, after: Sequence[Member], timeout_seconds: float
    ) -> MeshBackend:
        """Return the backend once the group is connected. Raises `Timeout`."""
        until = time.monotonic() + timeout_seconds
        others = "the others" if size is None else f"{size - 1} more"
        waited_for = f"{others} in the group {group!r}"
        try:
            while True:
                formed = self.gathering.wait_for(group, size, [each.process_id for each in after])
                wait([formed], min(NOTICE_SECONDS, max(until - time.monotonic(), 0)))
                if not formed.done() and time.monotonic() < until:
                    sys.stderr.write(f"muster: waits for {waited_for}; Ctrl-C ends that\n")
                try:
                    closed = formed.result(max(until - time.monotonic(), 0))
                    members = self._linked_members(closed)
                    made = self._connect(group, members, closed, until)
                    self.backend = muster.mesh.last_discovered = made
                except (CollectiveError, KeyError, TimeoutError):
                    # One has died meanwhile; the others begin again, as this process does.
                    if time.monotonic() >= until:
                        raise self._timeout(group, waited_for, timeout_seconds) from None
                else:
                    return made
        except BaseException:
            self.gathering.stop_waiting()
            raise

    def check(self, members: Sequence[Member], since: float = inf) -> None:
        """Raise `PeerGone` if one is gone, or the network has cut the way to it since that time.

        What is sent over that way waits for minutes, although there may be another way by now.
        """
        for rank, member in enumerate(members):
            cut_at = self.network.cut.get((member.process_id, member.address[0]), -inf)
            if member.process_id in self.network.gone or cut_at > since:
                raise PeerGone(rank, str(member))

    def close(self) -> None:
        self.is_closed = True
        with _interrupted_later():
            self.announcer.close()
            self.network.close()

    def _linked_members(self, closed: Closed) -> list[Member]:
        """Return the members by rank. Raises KeyError if one is gone, or is not linked in time."""
        until = time.monotonic() + MEETING_SECONDS
        while True:
            try:
                return self.gathering.members_of(closed)
            except KeyError as error:  # the proposer may have been linked to it before this process
                if error.args[0] in self.network.gone or time.monotonic() >= until:
                    raise
            time.sleep(ON_WAIT_SECONDS)

    def _connect(
        self, group: str, members: list[Member], closed: Closed, until: float
    ) -> MeshBackend:
        ranks = [member.process_id for member in members]
        nodes = list(dict.fromkeys(member.node_id for member in members))
        own = Membership(
            rank=ranks.index(self.network.own_id),
            world_size=len(members),
            generation=0,
            token=closed.token,
        )
        endpoints = [Endpoint(*member.address, nodes.index(member.node_id)) for member in members]

        def check() -> None:
            for each in self.gathering.departed(closed):
                raise PeerGone(ranks.index(each), str(members[ranks.index(each)]))

        listener = self.network.lend_listener()
        try:
            connections = rendezvous(
                own,
                endpoints[0][:2],
                endpoints=endpoints,
                listener=listener,
                timeout_seconds=max(until - time.monotonic(), MEETING_SECONDS),
                unreachable_seconds=MEETING_SECONDS,
                on_wait=check,
            )
        finally:
            self.network.listen()
        return MeshBackend(own, connections, self, group, members)

    def _timeout(self, group: str, waited_for: str, seconds: float) -> Timeout:
        network, linked = self.network, self.network.hellos()
        said = [
            f"{member}, for the group {hello.group!r}"
            if hello.group not in (group, None)
            else str(member)
            for member, hello in linked
        ]
        facts = [waited_for, f"linked: {', '.join(said) or 'none'}"]
        if full := self.gathering.living_members():
            facts.append(f"a group of that name lives: {', '.join(map(str, full))}")
        known = {member.process_id for member, _ in linked}
        warnings = list(network.warnings)
        for each in list(self.announcer.heard.values())[:HEARD_LIMIT]:
            place = f"{each.addresses[0]} port {each.port}"
            if each.process_id not in known and not any(place in text for text in warnings):
                facts.append(f"{printable(each.host)} is announced, and not reached at {place}")
        cure = "wait longer, or see what is wrong: muster mesh doctor"
        return Timeout(seconds, "; ".join([*facts, *warnings]), cure)


def discover(
    peers: int | None = None,
    timeout_seconds: float = 30.0,
    *,
    group: str = "default",
    preset: str = "default",
    after: MeshBackend | None = None,
    addresses: Sequence[str] | None = None,
    rank: int | None = None,
) -> MeshBackend:
    """Return the backend of this script and `peers` others of the household that wait as well.

    `group` keeps runs apart. With `after` the members of an earlier group that are alive, and
    scripts that wait now, meet anew under its name; that backend is closed.

    With `addresses` there is no search: each is ``"host"`` or ``"host:port"``, their order
    gives the ranks, and `rank` is that of this machine. Such a group does not meet anew.

    Raises `Timeout`, `Unsupported`, `NoSecret`, `UnusableDirectory` and OSError.
    """
    if (peers, after, addresses).count(None) < 2:  # noqa: PLR2004  one way, or none
        raise Unsupported("discover() takes one of peers=, after= and addresses=")
    if addresses is not None:
        if rank is None:
            raise Unsupported("discover(addresses=) needs rank=, the place of this machine in them")
        return _connect_listed(addresses, rank, group, timeout_seconds)
    if after is not None:
        if after.mesh is None or after.mesh.is_closed:
            raise Unsupported(
                "discover(after=) takes a backend of discover(peers=) before its close()"
            )
        TcpBackend.close(after)
        return after.mesh.meet(after.group, None, after.members, timeout_seconds)
    peers = 1 if peers is None else peers
    if not (isinstance(peers, int) and 0 < peers < NAME_LIMIT):
        raise Unsupported(f"discover(peers={peers!r}): give a number from 1 to {NAME_LIMIT - 1}")
    mesh = None
    try:
        with _interrupted_later():
            mesh = Mesh(preset)
        return mesh.meet(group, 1 + peers, [], timeout_seconds)
    except BaseException:
        if mesh is not None:
            mesh.close()
        raise


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Have an interrupt wait for the end of the block, which begins or ends threads."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1)) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGINT)


def _connect_listed(
    addresses: Sequence[str], rank: int, group: str, timeout_seconds: float
) -> MeshBackend:
    """Return the backend of a list of machines, which prove the secret of the household."""
    files = DataDir(ServiceSettings.read(os.environ, cores=1).data_dir)
    key = shared_key(os.environ, files.cluster_key)
    own, endpoints = listed(addresses, rank, f"{key.hex()} {group}")
    members = [Member(f"{host}:{port}", host, host, (host, port)) for host, port, _ in endpoints]
    connections = rendezvous(
        own, endpoints[0][:2], endpoints=endpoints, timeout_seconds=timeout_seconds
    )
    return MeshBackend(own, connections, None, group, members)


def _listen() -> socket:
    """Return a socket at the first free port. Raises OSError."""
    for port in PORTS:
        try:
            return listen("0.0.0.0", port)  # noqa: S104  every connection has to prove the secret
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == PORTS[-1]:
                raise
    raise AssertionError
