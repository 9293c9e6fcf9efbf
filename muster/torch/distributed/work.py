"""The tensors that an operation of a torch group works on, and what it returns."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.profiler import record_function

from muster.collectives.errors import Timeout, Unsupported

_OTHER_VIEWS: Final = {torch.bfloat16: torch.uint16, torch.bool: torch.uint8}
"""Of types that numpy does not have, or that cannot be combined as they are."""

_KEPT_BYTES: Final = 1024
"""Larger outputs are not worth keeping for a reader that hardly ever comes."""


class MusterWork(dist.Work):
    """One operation, under way or over."""

    _kept: Final[deque["MusterWork"]] = deque(maxlen=64)

    def __init__(self, name: str, group: str, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._name = f"{name} in group {group}"
        self._outputs = outputs
        self._outcome: Future[None] = Future()
        self.sources: Sequence[int] = ()
        """Filled with the rank that sent, if any could."""
        self._event = record_function(f"muster:{name}")
        self._event.__enter__()

    def __del__(self) -> None:
        # C++ code may still hold this work without this object, and would then wait for ever. DDP's
        # `join(divide_by_initial_world_size=False)` does, for a sum of one number.
        if sum(output.nbytes for output in self._outputs) <= _KEPT_BYTES:
            self._kept.append(self)

    def run(self, job: Callable[[], object]) -> None:
        """Do the job; `wait` raises what it raises."""
        failure = None
        try:
            job()
        except Exception as error:  # noqa: BLE001  of the user's tensors, too
            # Scripts that were written for gloo look for this word.
            why = "timeout reached, it " if isinstance(error, Timeout) else ""
            failure = dist.DistBackendError(f"{self._name} failed: {why}{error}")
            failure.__cause__ = error
        self._event.__exit__(None, None, None)
        if failure is not None:
            self._outcome.set_exception(failure)
        else:
            self._outcome.set_result(None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True once the outputs are complete; raises `DistBackendError`."""
        seconds = timeout.total_seconds()
        try:
            self._outcome.result(seconds if seconds > 0 else None)
        except TimeoutError as error:
            raise dist.DistBackendError(
                f"{self._name} has not ended within {seconds:g} s: check the other ranks, or wait "
                "longer"
            ) from error
        return True

    def is_completed(self) -> bool:
        return self._outcome.done()

    def is_success(self) -> bool:
        return self._outcome.done() and self._outcome.exception() is None

    def exception(self) -> BaseException | None:
        return self._outcome.exception() if self._outcome.done() else None

    def source_rank(self) -> int:
        """Return the rank in the group from which a message came that any could send."""
        return self.sources[0]

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:  # noqa: ANN401  a future of torch
        """Return a future of the outputs."""
        ended = torch.futures.Future(
            devices=list({output.device for output in self._outputs if output.is_cuda})
        )
        # C++ code such as DDP sees an error only if a callback raises it: what `set_exception` sets
        # would be a result to it.
        outputs = ended.then(lambda _: self.wait() and self._outputs)
        if self._outcome.done():  # DDP reads the value then without waiting
            ended.set_result(None)
            return outputs
        # Callbacks may wait for further operations, so the thread that runs those cannot call them.
        self._outcome.add_done_callback(lambda _: _callbacks.submit(lambda: ended.set_result(None)))
        return outputs


class _Callbacks:
    """Daemon threads, as many as there are callbacks that wait for each other."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def submit(self, job: Callable[[], object]) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._serve, name="muster-callbacks", daemon=True).start()
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            self._jobs.get()()
            with self._lock:
                self._idle += 1


_callbacks: Final = _Callbacks()


class Operand:
    """A tensor as contiguous host memory: its own, or a copy while an operation runs."""

    def __init__(self, tensor: torch.Tensor, *, is_staged: bool) -> None:
        if tensor.layout is not torch.strided:
            raise unsupported("a sparse tensor here", "call to_dense() first")
        self.tensor = host = tensor.detach()  # keeps the memory while an operation uses views of it
        self.dtype = "bfloat16" if tensor.dtype is torch.bfloat16 else None
        self._is_copy = is_staged or not tensor.is_contiguous()
        if self._is_copy:
            # No cache is needed: torch keeps free pinned memory for the next tensor.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._flat = host.view(-1)
        self._stream: Any = None
        if tensor.is_cuda:
            # In a stream of its own the copy does not wait for the rest of a backward pass.
            self._stream = torch.cuda.Stream(tensor.device)
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))

    def fetch(self) -> None:
        """Copy, once earlier operations of the group have ended: they may be on the same tensor."""
        self._copy(self.tensor, self._flat.view(self.tensor.shape))

    def put_back(self) -> None:
        self._copy(self._flat.view(self.tensor.shape), self.tensor)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._is_copy:
            with torch.cuda.stream(self._stream):
                target.copy_(source)

    @property
    def octets(self) -> NDArray[np.uint8]:
        """The memory as bytes, for operations that only move them."""
        octets: NDArray[np.uint8] = self._flat.view(torch.uint8).numpy()
        return octets

    @property
    def numbers(self) -> NDArray[Any]:
        numbers: NDArray[Any] = self._flat.view(
            _OTHER_VIEWS.get(self._flat.dtype, self._flat.dtype)
        ).numpy()
        return numbers


def unsupported(feature: str, instead: str) -> Exception:
    error: Exception = dist.DistBackendError(f"muster does not support {feature}: {instead}")
    error.__cause__ = Unsupported(str(error))
    return error
