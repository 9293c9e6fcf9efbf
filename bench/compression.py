"""Encoders and decoders of compressed gradients, on one core: beside a memcpy of the gradient.

    python bench/compression.py

All take turns; the median over the rounds is printed, in GB of float32 a second. The gradient has
the spread of real ones: small numbers, many below the normal numbers of fp16.
"""

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from muster.collectives.compression import half
from muster.collectives.compression.kinds import Compression, kind_of

SHAPE = (2048, 4096)
"""32 MB: larger than the caches."""
ROUNDS = 9
KINDS: tuple[Compression, ...] = (
    *("fp16", "bf16", "int8", "sign"),
    {"kind": "sign", "bits": 2},
    {"kind": "top_k", "ratio": 0.01},
    {"kind": "top_k", "ratio": 0.01, "values": "int8"},
    {"kind": "top_k", "ratio": 0.01, "values": {"kind": "sign", "bits": 2}},
    {"kind": "top_k", "ratio": 0.001},
    {"kind": "random", "ratio": 0.1},
    *({"kind": "power_sgd", "rank": rank} for rank in (1, 2, 4)),
)


def contenders(gradient: np.ndarray) -> dict[str, Callable[[], object]]:
    total, bits = np.zeros_like(gradient), np.empty(gradient.size, np.uint16)
    flat, flat_total = gradient.reshape(-1), total.reshape(-1)
    found: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(total, gradient),
        "round_fp16": lambda: half.round_fp16(flat, flat_total),
        "round_bf16": lambda: half.round_bf16(flat, flat_total),
        "encode_fp16": lambda: half.encode_fp16(flat, bits),
        "encode_bf16": lambda: half.encode_bf16(flat, bits),
    }
    for compression in KINDS:
        kind = kind_of(compression)
        name = compression if isinstance(compression, str) else json.dumps(compression)
        message = kind.encode(gradient)
        found[f"{name} encode"] = lambda kind=kind: kind.encode(gradient)
        found[f"{name} add"] = lambda kind=kind, message=message: kind.add(message, total)
    return found


def main() -> None:
    draw = np.random.default_rng(0)
    spread = np.exp(draw.normal(-14, 2, (SHAPE[0], 1))).astype(np.float32)
    gradient = draw.standard_normal(SHAPE, np.float32) * spread
    runs = contenders(gradient)
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    for name, taken in times.items():
        print(f"{gradient.nbytes / 1e9 / statistics.median(taken):8.2f} GB/s  {name}")


if __name__ == "__main__":
    main()
