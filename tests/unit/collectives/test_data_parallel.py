"""Gradients that are averaged while others are computed, and the context of a function."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from muster.collectives import DataParallel, DistributedContext, SimulatedBackend
from muster.collectives.backend import Backend
from muster.collectives.errors import SizeMismatch, Unsupported
from muster.collectives.simulated import run_ranks

TRACED = """
import numpy as np
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from muster.collectives import SimulatedBackend, barrier, broadcast
from muster.collectives.simulated import run_ranks

def rank(backend):
    broadcast(backend, np.ones(3))
    barrier(backend)

spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
run_ranks(SimulatedBackend.create_group(1), rank)
for span in spans.get_finished_spans():
    print(f"{span.name}={span.attributes['muster.bytes']}")
"""

SHAPES = [(3, 4), (5,), (), (2, 2, 2), (7,)]
RANKS = 3


def parameters_of(rank: int) -> list[np.ndarray]:
    generator = np.random.default_rng(rank)
    return [
        generator.standard_normal(shape).astype(np.float64 if len(shape) == 3 else np.float32)
        for shape in SHAPES
    ]


def on_all_ranks(function: Callable[[Backend], object]) -> list[object]:
    return run_ranks(SimulatedBackend.create_group(RANKS), function)


@pytest.mark.parametrize("bucket_bytes", [1, 40, 25 << 20])
def test_gradients_are_averaged_in_place(bucket_bytes: int) -> None:
    expected = [
        sum(arrays) / RANKS for arrays in zip(*map(parameters_of, range(RANKS)), strict=True)
    ]

    def rank(backend: Backend) -> None:
        parameters = parameters_of(backend.rank + 10)
        parallel = DataParallel(parameters, backend, bucket_bytes=bucket_bytes)
        for array, first in zip(parameters, parameters_of(10), strict=True):
            assert array.tobytes() == first.tobytes(), "all begin with those of rank 0"
        gradients = parameters_of(backend.rank)
        for number in reversed(range(len(gradients))):
            parallel.ready(number, gradients[number])
        averages = parallel.finish()
        for own, average, right in zip(gradients, averages, expected, strict=True):
            assert average is own
            np.testing.assert_allclose(own, right, rtol=1e-6)

    on_all_ranks(rank)


def test_parameter_that_few_ranks_use_is_averaged_with_zeros() -> None:
    def rank(backend: Backend) -> list[object]:
        parallel = DataParallel([np.zeros(2), np.zeros(2), np.zeros(2)], backend, bucket_bytes=1)
        if backend.rank == 1:
            parallel.ready(1, np.full(2, 3.0))
        parallel.ready(2, np.full(2, float(backend.rank)))
        found = parallel.finish()
        return [None if it is None else it.tolist() for it in found]

    assert on_all_ranks(rank) == [[None, [1, 1], [1, 1]]] * RANKS


def test_nothing_is_averaged_without_sync() -> None:
    def rank(backend: Backend) -> float:
        parallel = DataParallel([np.zeros(1)], backend)
        gradient = np.full(1, float(backend.rank))
        with parallel.no_sync():
            parallel.ready(0, gradient)
            assert parallel.finish() == []
        gradient += 1
        parallel.ready(0, gradient)
        return float(parallel.finish()[0][0])

    assert on_all_ranks(rank) == [2.0] * RANKS


def test_gradient_of_another_size_is_refused() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    parallel = DataParallel([np.zeros(3)], backend)
    with pytest.raises(SizeMismatch):
        parallel.ready(0, np.zeros(4))


def test_operations_are_spans_where_opentelemetry_is_in_use() -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    found = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, check=True).stdout
    assert sorted(found.decode().split()) == ["muster.barrier=0", "muster.broadcast=24"]


def test_context_adds_up_and_counts() -> None:
    def rank(backend: Backend) -> list[object]:
        context = DistributedContext(backend)
        array = np.ones(4)
        assert context.all_reduce(array) is array
        context.barrier()
        counts = context.metrics_snapshot()
        assert counts is not None
        return [
            context.is_master,
            context.world_size,
            array.tolist(),
            counts["all_reduce.completed"],
            counts["all_reduce.bytes_processed"],
            counts["barrier.completed"],
            DistributedContext(backend, has_metrics=False).metrics_snapshot(),
        ]

    found = on_all_ranks(rank)
    assert found == [[it == 0, RANKS, [3, 3, 3, 3], 1, 32, 1, None] for it in range(RANKS)]


def test_second_gradient_before_finish_is_refused() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    parallel = DataParallel([np.zeros(1)], backend)
    parallel.ready(0, np.ones(1))
    with pytest.raises(Unsupported, match=r"finish\(\)"):
        parallel.ready(0, np.ones(1))
