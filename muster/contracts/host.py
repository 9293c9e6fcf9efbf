"""What a host says about itself, and how hosts that differ can compute the same bits."""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What there is on a host, as a rank there would find it."""

    version: Annotated[str, Meta(description="Of Muster.")]
    python: str
    machine: Annotated[str, Meta(description="Such as x86_64 or aarch64.")]
    blas_kernel: Annotated[str, Meta(description="Kernel of numpy's OpenBLAS, such as Haswell.")]
    numpy: str
    simd: Annotated[tuple[str, ...], Meta(description="CPU features that numpy uses by choice.")]
    cpu_cores: int
    ram_mb: int
    gpus: Annotated[tuple[str, ...], Meta(description="As nvidia-smi -L shows them.")]

    @property
    def processor(self) -> str:
        """The kind of processor, and the kernel that decides its bits."""
        return f"{self.machine} {self.blas_kernel}"

    @property
    def arithmetic(self) -> str:
        """What decides the bits of its numbers, as far as it is told."""
        return f"{self.processor}, numpy {self.numpy} with {' '.join(self.simd) or 'its baseline'}"


X86_KERNELS: Final = (
    ("Nehalem",),
    ("Sandybridge",),
    ("Haswell", "Zen"),
    ("SkylakeX",),
    ("Cooperlake",),
    ("SapphireRapids",),
)
"""Kernels of OpenBLAS, the oldest first. A processor of one row runs the first kernel of each row
up to its own (OpenBLAS, driver/others/dynamic.c)."""


def common_kernels(facts: Mapping[str, HostFacts]) -> dict[str, dict[str, str]]:
    """Return by host the variables with which all hosts use the same kernels.

    They have to be set before numpy is loaded. Empty if hosts use the same ones already, and if
    nothing is known to help: other versions of numpy, or kernels that are not in the table.
    """
    levels = {kernel.lower(): level for level, row in enumerate(X86_KERNELS) for kernel in row}
    kernels = {it.blas_kernel.lower() for it in facts.values()}
    machines = {it.machine for it in facts.values()}
    is_known = machines == {"x86_64"} and kernels <= levels.keys()
    if not is_known or len({it.numpy for it in facts.values()}) > 1:
        return {}
    if len({it.arithmetic for it in facts.values()}) == 1:
        return {}
    oldest = X86_KERNELS[min(levels[kernel] for kernel in kernels)][0]
    common = set.intersection(*(set(it.simd) for it in facts.values()))
    # numpy warns if it is to do without a feature that the processor has not.
    return {
        host: {
            "OPENBLAS_CORETYPE": oldest,
            "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in it.simd if name not in common),
        }
        for host, it in facts.items()
    }
