"""How fast a GPU is beside others, and whether moving data to one pays."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FLOPS_FACTORS: Final[Mapping[str, float]] = {
    "RTX 4090": 1.0,
    "RTX 4080": 0.72,
    "RTX 3090": 0.55,
    "RTX 3080": 0.45,
    "A100": 1.2,
    "H100": 2.0,
    "Jetson Orin": 0.06,
    "Jetson Nano": 0.02,
}
"""Speed in multiples of an RTX 4090. An Orin Nano is an Orin, so that comes first."""

UNKNOWN_GPU_FACTOR: Final = 0.5
CPU_FACTOR: Final = 0.01


def flops_factor(gpu_type: str) -> float:
    """Return the factor of the first model whose words `gpu_type` has, in any case and spelling."""
    words = _words(gpu_type)
    known = (factor for model, factor in FLOPS_FACTORS.items() if _words(model) <= words)
    return next(known, UNKNOWN_GPU_FACTOR)


def _words(model: str) -> set[str]:
    # Letters and digits apart: "RTX4090" is an RTX 4090, and "RTX A1000" is no A100.
    return set(re.findall(r"[a-z]+|[0-9]+", model.lower()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCost:
    """What transfer and computing cost, and how much longer computing has to take."""

    transfer_us_per_mb: float = 40.0
    compute_us_per_mflop: float = 0.01
    min_ratio: float = 5.0


DEFAULT_COST: Final = GpuCost()


def is_gpu_worth(transfer_mb: float, compute_mflop: float, cost: GpuCost = DEFAULT_COST) -> bool:
    """Return whether computing takes more than `min_ratio` times as long as the transfer."""
    transfer_us = transfer_mb * cost.transfer_us_per_mb
    compute_us = compute_mflop * cost.compute_us_per_mflop
    return compute_us > cost.min_ratio * transfer_us
