"""Messages and collective operations between ranks, a library of its own; docs/collectives.md.

    from muster.collectives import TcpBackend, all_reduce

    backend = TcpBackend.connect("127.0.0.1:29500", rank=0, world_size=2)
    all_reduce(backend, gradient, op="mean")

backend.py          the interface of a transport
transports/         sockets, shared memory; how ranks meet, over `muster.links` if apart
simulated.py        ranks that are threads of one process
subgroups.py        some ranks of another backend; two backends as one
operations.py       the collective operations (calls.py, operation_queue.py); context.py
routes.py           who sends what to whom, as data; planning/, explain.py: what it costs
engine.py           plays a route on a backend
errors.py           what all of them raise
data_parallel.py    averages gradients while they are computed
compression/        gradients in fewer bytes, one file a kind
reduction/          the fixed tree of managed jobs
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from muster.collectives.backend import Backend as Backend
    from muster.collectives.context import DistributedContext as DistributedContext
    from muster.collectives.data_parallel import DataParallel as DataParallel
    from muster.collectives.errors import Aborted as Aborted
    from muster.collectives.errors import BackendUnavailable as BackendUnavailable
    from muster.collectives.errors import CallMismatch as CallMismatch
    from muster.collectives.errors import ChannelClosed as ChannelClosed
    from muster.collectives.errors import CollectiveError as CollectiveError
    from muster.collectives.errors import InvalidRank as InvalidRank
    from muster.collectives.errors import InvalidWorldSize as InvalidWorldSize
    from muster.collectives.errors import NoConnection as NoConnection
    from muster.collectives.errors import PeerRefused as PeerRefused
    from muster.collectives.errors import PeerUnreachable as PeerUnreachable
    from muster.collectives.errors import SelfMessage as SelfMessage
    from muster.collectives.errors import SizeMismatch as SizeMismatch
    from muster.collectives.errors import Timeout as Timeout
    from muster.collectives.errors import TransportFailed as TransportFailed
    from muster.collectives.errors import Unsupported as Unsupported
    from muster.collectives.operation_queue import Handle as Handle
    from muster.collectives.operation_queue import counters as counters
    from muster.collectives.operations import all_gather as all_gather
    from muster.collectives.operations import all_reduce as all_reduce
    from muster.collectives.operations import all_to_all as all_to_all
    from muster.collectives.operations import barrier as barrier
    from muster.collectives.operations import broadcast as broadcast
    from muster.collectives.operations import gather as gather
    from muster.collectives.operations import reduce as reduce
    from muster.collectives.operations import reduce_scatter as reduce_scatter
    from muster.collectives.operations import scatter as scatter
    from muster.collectives.simulated import SimulatedBackend as SimulatedBackend
    from muster.collectives.subgroups import HybridBackend as HybridBackend
    from muster.collectives.subgroups import SubBackend as SubBackend
    from muster.collectives.transports.shared_memory import (
        SharedMemoryBackend as SharedMemoryBackend,
    )
    from muster.collectives.transports.tcp import RingBackend as RingBackend
    from muster.collectives.transports.tcp import TcpBackend as TcpBackend

_NAMES: Final = {
    "backend": "Backend",
    "context": "DistributedContext",
    "data_parallel": "DataParallel",
    "errors": "Aborted BackendUnavailable CallMismatch ChannelClosed CollectiveError InvalidRank "
    "InvalidWorldSize NoConnection PeerRefused PeerUnreachable SelfMessage SizeMismatch Timeout "
    "TransportFailed Unsupported",
    "operation_queue": "Handle counters",
    "operations": "all_gather all_reduce all_to_all barrier broadcast gather reduce "
    "reduce_scatter scatter",
    "transports.shared_memory": "SharedMemoryBackend",
    "simulated": "SimulatedBackend",
    "subgroups": "HybridBackend SubBackend",
    "transports.tcp": "RingBackend TcpBackend",
}
_MODULE_OF: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:  # noqa: ANN401  a module attribute can be anything
    # Lazy, as `muster` is: a managed rank needs few of these modules, and starts sooner.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'muster.collectives' has no attribute {name!r}")
    return getattr(import_module(f"muster.collectives.{_MODULE_OF[name]}"), name)
