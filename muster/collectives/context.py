"""What a training function needs of its group, in one object."""

from muster.collectives.backend import TIMEOUT_SECONDS, Backend
from muster.collectives.calls import Op
from muster.collectives.engine import Array
from muster.collectives.operation_queue import Outcome, counters
from muster.collectives.operations import all_reduce, barrier


class DistributedContext:
    """One rank of a group. It does not own the backend."""

    def __init__(self, backend: Backend, *, has_metrics: bool = True) -> None:
        self.backend = backend
        self._has_metrics = has_metrics

    @property
    def rank(self) -> int:
        return self.backend.rank

    @property
    def world_size(self) -> int:
        return self.backend.world_size

    @property
    def is_master(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def all_reduce(
        self,
        array: Array,
        op: Op = "sum",
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        async_op: bool = False,
    ) -> Outcome:
        """As `muster.collectives.all_reduce`: in place, and returns `array`."""
        return all_reduce(
            self.backend, array, op, timeout_seconds=timeout_seconds, async_op=async_op
        )

    def barrier(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """Return when every rank has called this."""
        barrier(self.backend, timeout_seconds=timeout_seconds)

    def metrics_snapshot(self) -> dict[str, float] | None:
        """Return the `counters` of this group, or None without metrics."""
        return counters(self.backend) if self._has_metrics else None
