"""Gradients that are averaged while others are computed, and the context of a function."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from muster.collectives import DataParallel, DistributedContext, SimulatedBackend, counters
from muster.collectives.backend import Backend
from muster.collectives.compression.kinds import Compression
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


COMPRESSIONS = [
    "float32",
    "fp16",
    "bf16",
    "int8",
    "sign",
    {"kind": "top_k", "ratio": 0.05, "values": "int8"},
    {"kind": "random", "ratio": 0.1},
    {"kind": "power_sgd", "rank": 2},
    {300: "int8", 1000: {"kind": "top_k", "ratio": 0.05}},
]
COMPRESSED_SHAPES = [(30, 40), (9,), (20, 3, 10), (2, 20)]
"""Two matrices that are compressed, a bias and a small one that stay whole."""


def gradients_of(rank: int) -> list[np.ndarray]:
    draw = np.random.default_rng(rank)
    return [draw.standard_normal(shape, np.float32) for shape in COMPRESSED_SHAPES]


@pytest.mark.slow
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
def test_what_is_not_sent_comes_later(compression: Compression) -> None:
    """Of equal gradients the sum of averages stays as near to theirs as a residual is large."""
    steps = 60

    def rank(backend: Backend) -> list[np.ndarray]:
        parameters = [np.zeros(shape, np.float32) for shape in COMPRESSED_SHAPES]
        parallel = DataParallel(parameters, backend, compression=compression, bucket_bytes=5000)
        for _ in range(steps):
            for number in reversed(range(len(parameters))):
                parallel.ready(number, gradients_of(backend.rank)[number])
            for number, average in enumerate(parallel.finish()):
                parameters[number] += average / steps
        return parameters

    found = on_all_ranks(rank)
    assert len({b"".join(it.tobytes() for it in arrays) for arrays in found}) == 1
    means = [sum(arrays) / RANKS for arrays in zip(*map(gradients_of, range(RANKS)), strict=True)]
    for number, (average, mean) in enumerate(zip(found[0], means, strict=True)):
        exact = number % 2 or compression == "float32"
        error = np.linalg.norm(average - mean) / np.linalg.norm(mean)
        assert error < (1e-6 if exact else 0.35), number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "feedback"),
    [
        *((it, True) for it in COMPRESSIONS),
        ("int8", False),
        ({"kind": "random", "ratio": 0.1}, False),
    ],
    ids=str,
)
def test_least_squares_converge(compression: Compression, feedback: bool) -> None:  # noqa: FBT001
    def rank(backend: Backend) -> float:
        draw = np.random.default_rng(backend.rank)
        inputs = draw.standard_normal((200, 30), np.float32)
        right = np.outer(np.arange(30), np.ones(40)).astype(np.float32) / 30
        weights = np.zeros((30, 40), np.float32)
        parallel = DataParallel([weights], backend, compression=compression, feedback=feedback)
        for _ in range(100):
            parallel.ready(0, inputs.T @ (inputs @ (weights - right)) / 200)
            weights -= 0.05 * parallel.finish()[0]
        return float(np.linalg.norm(weights - right) / np.linalg.norm(right))

    assert max(on_all_ranks(rank)) < 0.15


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradient_that_is_not_finite_is_seen_and_forgotten(
    compression: Compression, value: float
) -> None:
    def rank(backend: Backend) -> list[float]:
        parallel = DataParallel([np.zeros((20, 90), np.float32)], backend, compression=compression)
        found = []
        for step in range(3):
            gradient = np.ones((20, 90), np.float32)
            if step == 1 and backend.rank == 1:
                gradient[3, 3] = value
            parallel.ready(0, gradient)
            found.append(float(np.isfinite(parallel.finish()[0]).mean()))
        return found

    for before, wrong, after in on_all_ranks(rank):
        assert (before, after) == (1, 1)
        assert wrong < 0.7, "at least the slice of one rank"


def test_residual_of_power_sgd_does_not_grow() -> None:
    """Ranks with different data: what each did not send is little, not its distance to the mean."""

    def rank(backend: Backend) -> float:
        weights = np.zeros((20, 30), np.float32)
        spec = {"kind": "power_sgd", "rank": 1}
        parallel = DataParallel([weights], backend, compression=spec)
        gradient = np.outer(np.arange(20), np.arange(30)).astype(np.float32) * (backend.rank + 1)
        for _ in range(20):
            parallel.ready(0, gradient.copy())
            parallel.finish()
        return counters(backend)["compression.residual_norm"] / float(np.linalg.norm(gradient))

    assert max(on_all_ranks(rank)) < 1e-4


@pytest.mark.parametrize(
    ("compression", "least", "most"),
    [("float32", 0.99, 1.01), ("bf16", 0.5, 0.52), ("int8", 0.25, 0.27), ("sign", 0.04, 0.06)],
)
def test_compression_is_counted(compression: str, least: float, most: float) -> None:
    def rank(backend: Backend) -> dict[str, float]:
        parallel = DataParallel(
            [np.zeros((100, 200), np.float32)], backend, compression=compression
        )
        for _ in range(2):
            parallel.ready(0, np.random.default_rng(0).random((100, 200), np.float32))
            parallel.finish()
        return counters(backend)

    for counts in on_all_ranks(rank):
        before = counts["compression.bytes_before"]
        assert before == 2 * (2 * 80_000 * (RANKS - 1) // RANKS), "what a ring sends"
        assert least < counts["compression.ratio"] < most
        assert counts["compression.bytes_after"] == pytest.approx(
            before * counts["compression.ratio"]
        )
        assert counts["compression.duration_ms"] > 0
        assert (counts["compression.residual_norm"] > 0) == (compression != "float32")


def test_unknown_compression_is_refused() -> None:
    (backend,) = SimulatedBackend.create_group(1)
    with pytest.raises(Unsupported, match="int4"):
        DataParallel([np.zeros(3)], backend, compression={9: "int8", 99: "int4"})


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
