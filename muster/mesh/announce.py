"""Announces this process by multicast DNS, and finds others that do. Needs zeroconf.

An announcement is a hint: a process proves itself over a link, and its end is known from there.
What strangers announce is read from zeroconf's cache alone, which costs no thread and no question.

zeroconf fixes its sockets when it is made, so it is made anew whenever the addresses of this
machine change.
"""

import ipaddress
import socket
import threading
from typing import Any, Final, NamedTuple

from muster.host.extras import install_command
from muster.links.session import PROTOCOL
from muster.mesh.network import NAME_LIMIT, Network
from muster.mesh.secret import RUN

try:
    import ifaddr
    from zeroconf import Error, IPVersion, ServiceBrowser, ServiceInfo, Zeroconf
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"muster.mesh needs {error.name}, which is not installed: {install_command('home')}",
        name=error.name,
    ) from error

SERVICE: Final = "_muster._tcp.local."
POLL_SECONDS: Final = 0.5
LEFT_OUT: Final = (
    *("docker", "br-", "veth", "virbr", "cni", "podman", "flannel"),  # of containers
    *("tun", "tap", "wg", "tailscale", "zt", "utun", "ppp"),  # of private networks
)
_TXT: Final = (b"host", b"node", b"cluster", b"protocol")


class Announced(NamedTuple):
    """What a process announces of itself in clear; nothing of it is proved."""

    process_id: str
    addresses: tuple[str, ...]
    port: int
    host: str
    """The name of its machine."""
    node_id: str
    cluster: str
    protocol: str


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this machine that others may reach, one for each subnet."""
    found: dict[ipaddress.IPv4Network, str] = {}
    for adapter in ifaddr.get_adapters():
        for address in adapter.ips:
            if address.is_IPv4 and not adapter.nice_name.startswith(LEFT_OUT):
                subnet = ipaddress.IPv4Interface(f"{address.ip}/{address.network_prefix}")
                if not (subnet.is_loopback or subnet.is_link_local):
                    found.setdefault(subnet.network, str(subnet.ip))
    return sorted(found.values())


class Announcer:
    """Announces a network until it is closed, and has it call what others announce."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._claim = network.identity.own
        self.heard: dict[str, Announced] = {}
        """What others announce now, by process id. Read by other threads."""
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="muster announces", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                self._announce(own_addresses())
            except (OSError, Error):  # an address that has gone again, or a machine too busy
                self._is_closed.wait(POLL_SECONDS)

    def _announce(self, addresses: list[str]) -> None:
        """Announce and find until the addresses of this machine are others, or it is closed."""
        info = ServiceInfo(
            SERVICE,
            f"{self._claim.process_id}.{SERVICE}",
            addresses=[socket.inet_aton(address) for address in addresses or ["127.0.0.1"]],
            port=self._network.port,
            properties={
                b"host": socket.gethostname(),
                b"node": self._claim.node_id,
                b"cluster": self._claim.cluster,
                b"protocol": str(PROTOCOL),
            },
        )
        # On loopback, too: two terminals of a machine without a network find each other.
        interfaces = [*addresses, "127.0.0.1"]
        with Zeroconf(interfaces=interfaces, ip_version=IPVersion.V4Only) as zeroconf:
            # The name is random: to ask whether another has it lets a stranger answer that it has.
            zeroconf.register_service(info, cooperating_responders=True)
            with ServiceBrowser(zeroconf, SERVICE, handlers=[self._on_change]):
                while own_addresses() == addresses and not self._is_closed.wait(POLL_SECONDS):
                    pass

    def _on_change(self, zeroconf: Zeroconf, name: str, **_: Any) -> None:  # noqa: ANN401
        process_id, own = name.removesuffix(f".{SERVICE}"), self._claim.cluster
        try:
            info = ServiceInfo(SERVICE, name)
        except Error:  # a stranger can announce any name
            return
        self.heard.pop(process_id, None)
        if not info.load_from_cache(zeroconf) or info.port is None:
            return  # removed: its link ends by itself
        addresses = tuple(info.parsed_addresses(IPVersion.V4Only))
        is_other = process_id != self._network.own_id
        if addresses and is_other and len(self.heard) < NAME_LIMIT:
            txt = [(info.properties.get(key) or b"").decode(errors="replace") for key in _TXT]
            said = Announced(process_id, addresses, info.port, txt[0] or process_id, *txt[1:])
            if said.cluster != own and RUN in said.cluster + own:
                return  # a `muster run --peers` meets its like alone: no mistake to warn of
            self.heard[process_id] = said
        for address in addresses:
            self._network.find((address, info.port), process_id)
