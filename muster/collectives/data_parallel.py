"""Averages gradients over all ranks while the rest of them is still computed.

Gradients are collected in buckets, in reverse order of the parameters, as a backward pass computes
them. A bucket that is complete is averaged in the background, in the same order on all ranks (Li et
al., "PyTorch distributed: experiences on accelerating data parallel training", 2020).
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

from muster.collectives.backend import TIMEOUT_SECONDS, Backend
from muster.collectives.compression.exchange import Average, Compressor
from muster.collectives.engine import Array
from muster.collectives.errors import SizeMismatch, Unsupported
from muster.collectives.operation_queue import Handle
from muster.collectives.operations import all_reduce, broadcast

BUCKET_BYTES: Final = 25 << 20


class DataParallel:
    """Keeps the gradients of one model equal on all ranks; numpy arrays and torch tensors alike.

        parallel = DataParallel(parameters, backend)
        for batch in batches:
            for number, gradient in backward(batch):   # torch: loss.backward()
                parallel.ready(number, gradient)       # torch: hooks do this
            gradients = parallel.finish()

    All ranks begin with the parameters of rank 0. Tensors have to be in the memory of the host.

    `compression` sends gradients of float32 in fewer bytes, those of biases and norms excepted: a
    name such as "int8", or what `muster.collectives.compression.kinds` describes. With `feedback`
    what a rank did not send is added to its next gradient; it is lost with the rank.
    """

    def __init__(
        self,
        parameters: Any,  # noqa: ANN401  arrays, tensors or a module of torch
        backend: Backend,
        *,
        compression: Any = None,  # noqa: ANN401  a name or a mapping
        feedback: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        # As in torch: a model, or its parameters, of which frozen ones have no gradient.
        given = list(parameters.parameters() if hasattr(parameters, "parameters") else parameters)
        self._parameters = [tensor for tensor in given if getattr(tensor, "requires_grad", True)]
        self._is_synced = True
        arrays = [_array_of(parameter) for parameter in self._parameters]
        dtypes = [_dtype_of(parameter) for parameter in self._parameters]
        self._buckets = _buckets_of(arrays, dtypes, bucket_bytes)
        if compression is not None:
            common = Compressor(backend, compression, feedback, timeout_seconds)
            for bucket in self._buckets:
                bucket.compress(common, arrays)
        self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.numbers}
        self._started = 0
        self._gradients: dict[int, Any] = {}
        for parameter in given:
            kind, array = _dtype_of(parameter), _array_of(parameter)
            broadcast(backend, array, dtype=kind, timeout_seconds=timeout_seconds)
        for number, parameter in enumerate(self._parameters):
            if hasattr(parameter, "register_post_accumulate_grad_hook"):
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, number))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Average nothing inside; the caller accumulates gradients until it passes them later."""
        self._is_synced = False
        try:
            yield
        finally:
            self._is_synced = True

    def ready(self, number: int, gradient: Any) -> None:  # noqa: ANN401  an array or a tensor
        """Take the gradient of parameter `number`, of its shape; `finish` writes to it.

        Raises `SizeMismatch`, and `Unsupported` if it was taken since `finish`.
        """
        if not self._is_synced:
            return
        bucket, array = self._bucket_of[number], _array_of(gradient)
        if number not in bucket.missing:
            raise Unsupported(
                f"parameter {number} has a gradient already: call finish() after each backward "
                "pass, and accumulate inside no_sync()"
            )
        part = bucket.parts[number]
        if array.nbytes != part.nbytes:
            raise SizeMismatch(part.nbytes, array.nbytes)
        # Copied: one message of a bucket costs less than one of each gradient, and the caller may
        # accumulate into its own memory meanwhile.
        part[...] = array.reshape(-1)
        self._gradients[number] = gradient
        bucket.missing.discard(number)
        # In their order, not as they complete: ranks have to start the same ones together.
        while self._started < len(self._buckets) and not self._buckets[self._started].missing:
            self._start_next()

    def finish(self) -> list[Any]:
        """Return the average gradient of each parameter, also written to what `ready` got.

        A rank that did not use a parameter adds zeros. Where no rank did, there is None. Raises
        what an `all_reduce` raises.
        """
        if not self._is_synced:
            return []
        used = np.zeros(len(self._parameters), np.uint8)
        used[list(self._gradients)] = 1
        try:
            for bucket in self._buckets[self._started :]:
                for number in bucket.missing:
                    bucket.parts[number][...] = 0
                self._start_next()
            all_reduce(self._backend, used, "max", timeout_seconds=self._timeout_seconds)
            for bucket in self._buckets:
                bucket.wait()
            return [self._average(number) if used[number] else None for number in range(used.size)]
        finally:
            self._started = 0
            self._gradients = {}
            for bucket in self._buckets:
                bucket.missing = set(bucket.numbers)

    def _accumulated(self, number: int, parameter: Any) -> None:  # noqa: ANN401  a tensor
        self.ready(number, parameter.grad)

    def _start_next(self) -> None:
        self._buckets[self._started].start(self._backend, self._timeout_seconds)
        self._started += 1

    def _average(self, number: int) -> Any:  # noqa: ANN401  an array or a tensor
        parameter, part = self._parameters[number], self._bucket_of[number].parts[number]
        gradient = self._gradients.get(number)
        if gradient is None:
            is_tensor = hasattr(parameter, "new_empty")
            shape = parameter.shape
            gradient = parameter.new_empty(shape) if is_tensor else np.empty(shape, part.dtype)
            if is_tensor:
                parameter.grad = gradient
        array = _array_of(gradient)
        array[...] = part.reshape(array.shape)
        return gradient


class _Bucket:
    """Gradients that are averaged together, in one flat array."""

    def __init__(self, numbers: Sequence[int], arrays: Sequence[Array], dtype: str | None) -> None:
        self.numbers = tuple(numbers)
        self.missing = set(numbers)
        sizes = [arrays[number].size for number in numbers]
        self._dtype = dtype
        self._flat = np.empty(sum(sizes), arrays[numbers[0]].dtype)
        parts = np.split(self._flat, np.cumsum(sizes)[:-1])
        self.parts: dict[int, Array] = dict(zip(numbers, parts, strict=True))
        self._handle: Handle[Array] | None = None
        self._averages: list[Average] = []

    def compress(self, common: Compressor, arrays: Sequence[Array]) -> None:
        if self._flat.dtype == np.float32:
            self._averages = common.averages_of([arrays[number].shape for number in self.numbers])

    def start(self, backend: Backend, timeout_seconds: float) -> None:
        for average in self._averages:
            average.start(self._flat)
        if self._averages:
            return
        self._handle = all_reduce(
            backend,
            self._flat,
            "mean",
            dtype=self._dtype,
            timeout_seconds=timeout_seconds,
            async_op=True,
        )

    def wait(self) -> None:
        for average in self._averages:
            average.finish()
        if self._handle is not None:
            self._handle.wait()


def _buckets_of(
    arrays: Sequence[Array], dtypes: Sequence[str | None], bucket_bytes: int
) -> list[_Bucket]:
    """Cut the parameters, from the last to the first, into buckets of one data type."""
    runs: list[list[int]] = []
    for number in reversed(range(len(arrays))):
        if runs:
            first, size = runs[-1][0], sum(arrays[index].nbytes for index in runs[-1])
            is_alike = (arrays[first].dtype, dtypes[first]) == (
                arrays[number].dtype,
                dtypes[number],
            )
            if is_alike and size + arrays[number].nbytes <= bucket_bytes:
                runs[-1].append(number)
                continue
        runs.append([number])
    return [_Bucket(run, arrays, dtypes[run[0]]) for run in runs]


def _array_of(value: Any) -> Array:  # noqa: ANN401  an array or a tensor
    """Return the memory of an array or of a tensor in the memory of the host."""
    if isinstance(value, np.ndarray):
        return value
    tensor = value.detach()
    if _dtype_of(value) is None:
        array: Array = tensor.numpy()
        return array
    # numpy has no bfloat16. A tensor comes with torch, which this package does without.
    bits: Array = tensor.view(sys.modules["torch"].int16).numpy()
    return bits.view(np.uint16)


def _dtype_of(value: Any) -> str | None:  # noqa: ANN401  an array or a tensor
    return "bfloat16" if str(value.dtype) == "torch.bfloat16" else None
