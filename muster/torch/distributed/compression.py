"""A hook that lets DistributedDataParallel average gradients in fewer bytes.

state = CompressionState({"kind": "top_k", "ratio": 0.01})
model.register_comm_hook(state, compression_hook)
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from muster.collectives.backend import TIMEOUT_SECONDS
from muster.collectives.compression.exchange import Average, Compressor
from muster.collectives.compression.kinds import Compression
from muster.torch.distributed.backend import TorchBackend


class CompressionState:
    """What `compression_hook` keeps: a backend over `group`, and each rank's residuals.

    All ranks make one together, for each model another. Close it before the group is destroyed.
    """

    def __init__(
        self,
        compression: Compression,
        *,
        feedback: bool = True,
        group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.group = group
        self.backend = TorchBackend(group)
        self._common = Compressor(self.backend, compression, feedback, timeout_seconds)
        self._buckets: dict[int, tuple[Sequence[Any], list[Average]]] = {}
        # One thread: buckets follow each other in the order of the backward pass on all ranks.
        self._thread = ThreadPoolExecutor(1, "muster-compression")

    def close(self) -> None:
        self._thread.shutdown()
        self.backend.close()

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket in the background."""
        shapes = tuple(tuple(gradient.shape) for gradient in bucket.gradients())
        buffer, known = bucket.buffer(), self._buckets.get(bucket.index())
        if known is None or known[0] != shapes:  # DDP makes new buckets after the first step
            known = self._buckets[bucket.index()] = shapes, self._common.averages_of(shapes)
        averages = known[1]
        # The buffer itself, unless it is a GPU's. Here, as only this thread has the right stream.
        host = buffer.cpu()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                for average in averages:
                    average.start(host.numpy())
                for average in averages:
                    average.finish()
                future.set_result(buffer.copy_(host))
            except Exception as error:  # noqa: BLE001  `wait` raises it
                future.set_exception(error)

        self._thread.submit(run)
        # DDP would take an exception for a tensor; a callback that raises fails its own future.
        return future.then(lambda ended: ended.value())


def compression_hook(
    state: CompressionState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of float32 over all ranks; one of another type as DDP does."""
    if bucket.buffer().dtype is not torch.float32:
        return allreduce_hook(state.group, bucket)
    return state.submit(bucket)
