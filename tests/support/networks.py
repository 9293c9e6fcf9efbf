"""Networks of a household in this process, on loopback."""

from contextlib import ExitStack
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

from muster.links.serving import listen
from muster.mesh.gathering import Gathering
from muster.mesh.health import Preset
from muster.mesh.identity import mesh_identity
from muster.mesh.network import Network
from tests.support.installation import await_value

DEADLINE_SECONDS = 60.0
SECRET = bytes(32)
PRESET = Preset(every_seconds=0.1, timeout_seconds=1.0, failures=3)

_gatherings: Final[WeakKeyDictionary[Network, Gathering]] = WeakKeyDictionary()


def gathering(network: Network) -> Gathering:
    return _gatherings[network]


class Home:
    """Networks of this process on loopback."""

    def __init__(self, directory: Path, ending: ExitStack) -> None:
        self._directory = directory
        self._ending = ending
        self._made = 0

    def add(
        self,
        secret: bytes = SECRET,
        cluster: str = "home",
        host: str = "127.0.0.1",
        key: Path | None = None,
    ) -> Network:
        """Return the network of a new machine, or of the one with this key."""
        self._made += 1
        file = key or self._directory / f"node-{self._made}.key"
        own = mesh_identity(cluster, file, secret)
        network = Network(own, listen(host, 0), PRESET)
        _gatherings[network] = Gathering(network)
        self._ending.callback(network.close)
        return network

    def linked(self, count: int) -> list[Network]:
        """Return networks of which each knows where the others are."""
        networks = [self.add() for _ in range(count)]
        for network in networks:
            for other in networks:
                find(network, other)
        return networks


def find(network: Network, other: Network) -> None:
    network.find(("127.0.0.1", other.port), other.own_id)


def await_link(network: Network, other: Network) -> None:
    is_linked = lambda: other.own_id in [each.process_id for each in network.members()]  # noqa: E731
    await_value(is_linked, lambda: f"linked: {network.members()}; {list(network.warnings)}")
