"""The coordinator's life: win the lease, serve, hand over or shut down.

SIGTERM hands over: agents and ranks run on, and the next coordinator adopts them. SIGINT shuts
down: ranks save and exit, and their jobs wait in the queue for the next start.
"""

import asyncio
import dataclasses
import errno
import signal
import socket
import uuid
from collections import ChainMap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import structlog

from coordinator.agents.launching import AgentStarter
from coordinator.agents.lifecycle import AgentLifecycle
from coordinator.agents.server import AgentServer
from coordinator.host_probes import HostProbes, Prober
from coordinator.jobs import JobTable, wait_for_database
from coordinator.launchers.kubernetes import Kubernetes
from coordinator.launchers.launcher import AgentValues
from coordinator.launchers.local import LocalLauncher
from coordinator.launchers.mesh import MeshNodes
from coordinator.launchers.remote import CommandLauncher, CommandLaunchers
from coordinator.launchers.scheduler import SchedulerJobs, SchedulerProbe
from coordinator.launchers.slurm import Slurm
from coordinator.lease import LeaseCandidate
from coordinator.loop import CoordinatorLoop
from database.engine import Database
from database.errors import DatabaseUnavailable
from database.fenced_writer import FencedWriter
from database.hosts import Hosts
from database.jobs import Jobs
from database.leases import Leases
from database.records import Lease
from muster.cluster.description import ClusterNode
from muster.cluster.identity import node_id
from muster.cluster.members import ServiceCluster
from muster.contracts.agent import LOOPBACK
from muster.contracts.errors import InvalidEnvironment, MusterError
from muster.contracts.host import HostFacts
from muster.contracts.job.engine import SCHEDULERS, engine_row
from muster.contracts.messages.assignment import CoordinatorAddress
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.contracts.settings.variables import RANK_PORTS
from muster.host.addresses import publish_address, read_coordinator_address
from muster.host.limits import ShellLimits
from muster.host.processes import is_provably_gone, this_process, unblock_sigint
from muster.host.trace import stamp
from muster.links.serving import listen

ADDRESS_CHECK_SECONDS: Final = 2.0  # between checks of the address file
NODES_CHECK_SECONDS: Final = 0.5  # the same of the file of nodes

HOME_PORTS: Final = range(52448, 52960)
"""Where agents of other nodes reach us, and ranks each other: a household opens one range."""

_LOG: Final = structlog.get_logger("coordinator")


class Service:
    """A coordinator over one open database."""

    def __init__(
        self,
        database: Database,
        settings: ServiceSettings,
        environ: Mapping[str, str],
        limits: ShellLimits,
    ) -> None:
        """`limits` are those this process started with; its agents start with them, too."""
        self._limits = limits
        self._database = database
        self._settings = settings
        self._environ = environ
        self._data = DataDir(settings.data_dir)
        self._name = node_id(self._data.node_key)
        self._cluster = ServiceCluster(settings, self._name)
        self._take_nodes()
        self._mesh: MeshNodes | None = None
        if settings.nodes is not None:
            self._mesh = MeshNodes(settings.nodes, environ, self._data)
            ports = environ.get(RANK_PORTS.name) or f"{HOME_PORTS[0]}-{HOME_PORTS[-1]}"
            self._environ = {**environ, RANK_PORTS.name: ports}
        endpoint = settings.agent_endpoint
        has_scheduler = settings.engines & SCHEDULERS.keys()
        is_needed = has_scheduler or (self._other_nodes and endpoint is not None)
        if is_needed and not (endpoint and _is_own_address(endpoint[0])):
            other = next((node.name for node in self._other_nodes), "every node of the scheduler")
            wanted = f"an address of this host that {other} reaches, such as 10.0.0.1:7400"
            way = "set it for the coordinator"
            raise InvalidEnvironment(
                "MUSTER_AGENT_ADDRESS", settings.agent_address or "", wanted, way
            )
        self._leases = Leases(database)
        self._loop: CoordinatorLoop | None = None
        self._candidate: LeaseCandidate | None = None
        self._winning: asyncio.Task[Lease] | None = None
        self._is_shutting_down = False
        self._is_handing_over = False

    def _take_nodes(self) -> None:
        """Serve the nodes that there are now, with jobs that are read anew."""
        cluster, names = self._cluster(), self._cluster.members.names
        self._nodes = cluster.nodes
        self._absences = self._cluster.members.absences
        self._epoch = self._cluster.members.epoch
        self._other_nodes = [node for node in self._nodes if node.transport != "local"]
        self._jobs = JobTable(
            self._database,
            self._data,
            cluster=cluster,
            node=self._name,
            names=names,
            is_at_home=self._settings.nodes is not None,
        )
        self._jobs.minority = lambda: self._cluster.members.minority

    async def run(self) -> None:
        """Serve until a signal ends it. Raises `LeaseLost` if another coordinator took over."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.hand_over)
        loop.add_signal_handler(signal.SIGINT, self.shut_down)
        wake_ups, address = await listen_for_wake_ups(self._wake)

        def wake() -> None:  # from another thread, perhaps after the end of the event loop
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake)

        if self._database.listen(wake):
            address = ""
        own = this_process()

        def is_gone(holder: ProcessRecord) -> bool:
            """Return whether it is dead. The rows of a household are on this machine alone."""
            is_elsewhere = self._mesh is not None and holder.boot_id != own.boot_id
            return is_elsewhere or is_provably_gone(holder)

        self._candidate = LeaseCandidate(
            leases=self._leases,
            owner=f"{self._name}/{uuid.uuid4().hex}",
            process=own,
            address=address,
            is_gone=is_gone,
        )
        self._candidate.may_wait = not self._is_shutting_down
        self._winning = asyncio.ensure_future(self._win(self._candidate))
        unblock_sigint()
        try:
            while True:
                lease = await self._winning
                await self._serve(lease)
                with suppress(DatabaseUnavailable):  # a process that is gone loses its lease anyway
                    await asyncio.to_thread(self._leases.release, lease)
                if self._is_handing_over or self._is_shutting_down or not self._has_other_nodes():
                    return
                # As our successor would, without the seconds that a new process takes to start.
                self._loop = None
                self._take_nodes()
                self._winning = asyncio.ensure_future(self._win(self._candidate))
        except asyncio.CancelledError:
            return  # told to end before it held the lease
        finally:
            wake_ups.close()

    async def _win(self, candidate: LeaseCandidate) -> Lease:
        with suppress(DatabaseUnavailable):
            await asyncio.to_thread(self._jobs.warm_up)
        candidate.first_epoch = self._cluster.members.term
        lease = await candidate.win()
        if self._mesh is not None and candidate.displaced is not None:
            former = candidate.displaced.owner.partition("/")[0]
            self._jobs.former = former if former != self._name else ""
        return lease

    async def _serve(self, lease: Lease) -> None:
        stamp("lease won")
        launcher = LocalLauncher(self._environ, self._limits)
        forwarded, others = self._other_launchers(lease)
        hosts = Hosts(self._database)

        async def facts() -> dict[str, HostFacts]:
            known = await wait_for_database(lambda: asyncio.to_thread(hosts.all))
            return {name: host.facts for name, host in known.items() if host.facts is not None}

        holds_lease = partial(self._holds, lease)
        usable_mb = {
            node.name: {gpu.uuid: gpu.usable_vram_mb for gpu in node.gpus} for node in self._nodes
        }
        values = AgentValues(self._environ)
        engines = Slurm(values.environ), Kubernetes(self._environ)
        schedulers = {engine.name: SchedulerJobs(engine) for engine in engines}
        lifecycle = AgentLifecycle(
            AgentStarter(
                settings=self._settings,
                local=launcher,
                others=others,
                schedulers=schedulers,
                facts=facts,
                values=values,
                usable_vram_mb=usable_mb,
            ),
            holds_lease,
        )
        probed: dict[str, Prober] = dict(others)
        if self._other_nodes:
            # Our own host is asked by a process of its own: this one does without numpy.
            here = (node.name for node in self._nodes if node.transport == "local")
            data_dir = str(self._data.root)
            probed |= {
                name: CommandLauncher(name, ["env"], self._environ, data_dir) for name in here
            }
        probed |= {
            engine_row(name): SchedulerProbe(jobs, Jobs(self._database).by_uid)
            for name, jobs in schedulers.items()
            if name in self._settings.engines
        }
        place = self._settings.checkpoint_dir
        probes = HostProbes(
            probed,
            hosts,
            lease,
            Jobs(self._database).by_uid,
            self._data,
            place if isinstance(place, Path) else None,
        )
        self._jobs.refusals = ChainMap(self._absences, probes.refusals)
        addresses = await self._addresses()
        self._loop = CoordinatorLoop(
            writer=FencedWriter(self._database, lease),
            jobs=self._jobs,
            lifecycle=lifecycle,
            addresses=addresses,
            on_host_changed=probes.probe_soon,
        )
        if self._is_shutting_down:
            self._loop.drain()
        if self._is_handing_over:
            self._loop.hand_over()
        await self._loop.take_over()
        stamp("jobs loaded")
        agents = AgentServer(lease.epoch, self._loop, self._settings.agent_endpoint)
        self._loop.attach(agents)
        address = await agents.start(forwarded)
        publishing = asyncio.ensure_future(
            keep_address_published(
                address,
                self._data.coordinator_address,
                lambda: self._holds(lease),
                self._jobs.wake_agents,
            )
        )
        _LOG.info(
            f"coordinates, with {self._settings.slots} slots",
            action="lease_taken",
            epoch=lease.epoch,
            port=address.port,
        )
        launcher.start_fork_server()  # only now: its imports take as long as everything before
        probes.start()
        following = asyncio.ensure_future(self._follow_nodes(addresses))
        try:
            await self._loop.run()
        finally:
            publishing.cancel()
            following.cancel()
            await probes.stop()
            await agents.flush()
            await agents.stop()
            await lifecycle.detach()
            launcher.close()
            others.close()

    def _other_launchers(self, lease: Lease) -> tuple[socket.socket | None, CommandLaunchers]:
        """Return those of other hosts, and where agents connect whom they start.

        Their first order names the port.
        """
        forwarded = forward_to = None
        if self._other_nodes:
            endpoint = self._settings.agent_endpoint
            if self._mesh is not None:
                forwarded = _listen_for_nodes()
                endpoint = LOOPBACK, forwarded.getsockname()[1]
            elif endpoint is None:
                forwarded = listen(LOOPBACK, 0)
                endpoint = forwarded.getsockname()
            forward_to = CoordinatorAddress(
                host=endpoint[0], port=endpoint[1], number=(lease.epoch, 1)
            )
        return forwarded, CommandLaunchers(
            self._other_nodes, self._environ, self._data, forward_to, self._mesh
        )

    async def _follow_nodes(self, addresses: dict[str, str]) -> None:
        """End the loop once other nodes are in the cluster; until then keep their addresses."""
        while self._mesh is not None and self._loop is not None:
            await asyncio.sleep(NODES_CHECK_SECONDS)
            if self._has_other_nodes():
                _LOG.info("begins anew: the cluster is another one now", action="nodes_changed")
                self._loop.hand_over()
                return
            if (nodes := self._cluster().nodes) is not self._nodes:
                self._nodes = nodes
                self._absences.clear()
                self._absences.update(self._cluster.members.absences)
                addresses.update(await self._addresses())
                self._wake()

    def _has_other_nodes(self) -> bool:
        """Return whether other nodes are in the cluster, wherever those listen that we know.

        Also if this node leads in a later epoch: agents may have heard of one in between.
        """
        known, there = (
            [dataclasses.replace(node, host=LOOPBACK) for node in nodes]
            for nodes in (self._nodes, self._cluster().nodes)
        )
        return known != there or self._epoch != self._cluster.members.epoch

    async def _addresses(self) -> dict[str, str]:
        """Return where the ranks of each host reach those of the others."""
        endpoint = self._settings.agent_endpoint
        here = endpoint[0] if endpoint else await asyncio.to_thread(_own_address, self._nodes)
        return {node.name: here if node.transport == "local" else node.host for node in self._nodes}

    async def _holds(self, lease: Lease) -> bool:
        """Return True if the lease is still ours; waits for the database while it is away."""
        current = await wait_for_database(lambda: asyncio.to_thread(self._leases.current))
        return current is not None and current.epoch == lease.epoch

    def hand_over(self) -> None:
        """End soon; agents and ranks run on until the next coordinator starts."""
        self._is_handing_over = True
        if self._loop is not None:
            self._loop.hand_over()
        elif self._winning is not None:
            self._winning.cancel()

    def shut_down(self) -> None:
        """End once every rank has saved and exited; their jobs go back to the queue.

        A candidate first takes a free lease: ranks of the previous coordinator may still run.
        """
        self._is_shutting_down = True
        if self._loop is not None:
            self._loop.drain()
        elif self._candidate is not None:
            self._candidate.may_wait = False

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake_soon()


def _listen_for_nodes() -> socket.socket:
    """Return a socket at the first free port of a household. Raises `MusterError`."""
    for port in HOME_PORTS:
        with suppress(OSError):
            return listen("0.0.0.0", port)  # noqa: S104  every agent has to prove its token
    raise MusterError(
        f"none of the TCP ports {HOME_PORTS[0]}-{HOME_PORTS[-1]} is free, where agents of other "
        "nodes reach the coordinator: stop what listens there"
    )


def _is_own_address(host: str) -> bool:
    """True for an address that this host has, and where others can reach it."""
    try:
        if ip_address(host).is_loopback:
            return False
    except ValueError:  # a name
        return False
    try:
        listen(host, 0).close()
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _own_address(nodes: Sequence[ClusterNode]) -> str:
    """Return where others reach this host: the `host` of its node, if it is one of its addresses.

    Else, as for localhost, that of the interface that leads to the first other; nothing is sent.
    """
    here = next((node.host for node in nodes if node.transport == "local"), "")
    other = next((node.host for node in nodes if node.transport != "local"), "")
    if not other or _is_own_address(here):
        return here if other else LOOPBACK
    try:
        family, kind, _, _, address = socket.getaddrinfo(other, 22, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        words = f"no address of this host is known that {other} reaches ({error})"
        words += ": set host: of the local node in the cluster file to one"
        _LOG.warning(words, action="no_own_address")
        return LOOPBACK


async def keep_address_published(
    address: CoordinatorAddress,
    path: Path,
    holds_lease: Callable[[], Awaitable[bool]],
    on_published: Callable[[], None],
) -> None:
    """Publish the address, and again if the file says another while the lease is ours.

    The disk was full, the file was removed, or an older copy took its place.
    """
    while True:
        if read_coordinator_address(path) != address and await holds_lease():
            try:
                publish_address(address, path)
                on_published()
            except OSError as error:
                _LOG.warning(
                    "cannot write the address file", action="unpublished", error=str(error)
                )
        await asyncio.sleep(ADDRESS_CHECK_SECONDS)


class _WakeUps(asyncio.DatagramProtocol):
    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def datagram_received(self, _data: bytes, _address: tuple[str, int]) -> None:
        self._wake()


async def listen_for_wake_ups(wake: Callable[[], None]) -> tuple[asyncio.DatagramTransport, str]:
    """Call `wake` for every datagram of the API, which sends one after each write.

    Return the transport and its ``host:port`` on the loopback interface.
    """
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _WakeUps(wake), local_addr=("127.0.0.1", 0)
    )
    host, port = transport.get_extra_info("sockname")
    return transport, f"{host}:{port}"
