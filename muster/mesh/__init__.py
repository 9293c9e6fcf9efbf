"""Machines of one household that find and trust each other, and train together; docs/home.md.

    from muster.mesh import discover

    backend = discover(peers=1)

secret.py, identity.py  what proves household, node and process
announce.py             multicast DNS
network.py, calls.py    the thread that owns the links, and whom it calls
messages.py             what goes over them
health.py               who is lost. Pure
forming.py              who becomes a group; pure, for gathering.py
election.py             who leads; pure, for node.py
topology.py             which way round the ring goes; pure, for node.py
gathering.py, node.py   the parts of a network: the group of a script; the node of a machine
bandwidth.py            how fast a link is
streams.py, relay.py    bytes over links of their own; the API on every node
group.py                `discover`, and the backend
replicas.py             checkpoints of members, restored together
doctor.py               what stands between this process and another machine
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from muster.mesh.group import MeshBackend as MeshBackend
    from muster.mesh.group import PeerGone as PeerGone
    from muster.mesh.group import discover as discover

__all__: Final = ["MeshBackend", "PeerGone", "discover"]

last_discovered: "MeshBackend | None" = None
"""The backend of the group that this process has discovered last."""


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module attribute can be anything
    if name not in __all__:
        raise AttributeError(f"module 'muster.mesh' has no attribute {name!r}")
    return getattr(import_module("muster.mesh.group"), name)
