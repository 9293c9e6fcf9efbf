"""Facts that a host reports, and how hosts that differ can compute the same bits."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

FREE_LIMIT_MB: Final = 64
"""An agent is not started with less room for its logs."""

CLOCK_LIMIT_SECONDS: Final = 5.0


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What there is on a host, as the interpreter of the services finds it there.

    A job with another interpreter may have another numpy: its ranks are compared when they meet.
    """

    version: Annotated[str, Meta(description="Of Muster.")]
    python: Annotated[str, Meta(description="Version of the interpreter of the services.")]
    machine: Annotated[str, Meta(description="Such as x86_64 or aarch64.")]
    blas_kernel: Annotated[str, Meta(description="Kernel of numpy's OpenBLAS, such as Haswell.")]
    numpy: str
    simd: Annotated[tuple[str, ...], Meta(description="CPU features that numpy dispatches on.")]
    cpu_cores: Annotated[int, Meta(description="Logical processors that a rank may use.")]
    ram_mb: Annotated[int, Meta(description="Main memory that a rank may use, in MiB.")]
    gpus: Annotated[tuple[str, ...], Meta(description="As nvidia-smi -L shows them.")]
    disk_free_mb: Annotated[
        int | None, Meta(description="Free in its data directory, in MiB; null: not known.")
    ] = None
    clock_offset_seconds: Annotated[
        float, Meta(description="By which its clock is ahead of the coordinator's.")
    ] = 0.0

    def warnings(self) -> Iterator[str]:
        """Yield what a person should correct there, in sentences."""
        if self.disk_free_mb is not None and self.disk_free_mb < FREE_LIMIT_MB:
            yield f"{self.disk_free_mb} MiB are free in its data directory: make room there"
        if abs(seconds := self.clock_offset_seconds) > CLOCK_LIMIT_SECONDS:
            side = "ahead" if seconds > 0 else "behind"
            words = f"its clock is {abs(seconds):.0f} s {side}, as the times of its logs are"
            yield f"{words}: run `timedatectl set-ntp true` there"

    @property
    def processor(self) -> str:
        """The kind of processor, and the kernel that decides its bits."""
        return f"{self.machine} {self.blas_kernel}"

    @property
    def arithmetic(self) -> str:
        """What decides the bits of its numbers, as far as it is known."""
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


def common_environment(
    facts: Mapping[str, HostFacts],
) -> tuple[dict[str, dict[str, str]], str]:
    """Return by host the variables with which all hosts use the same kernels, and why.

    They have to be set before numpy is loaded. Both are empty if hosts compute the same bits
    anyway; without variables the reason says why none would help.
    """
    if len({own.arithmetic for own in facts.values()}) <= 1:
        return {}, ""
    if len({own.numpy for own in facts.values()}) > 1:
        return {}, "ranks with other bits will be refused: install the same numpy on all"
    levels = {kernel.lower(): level for level, row in enumerate(X86_KERNELS) for kernel in row}
    kernels = {own.blas_kernel.lower() for own in facts.values()}
    if {own.machine for own in facts.values()} != {"x86_64"} or not kernels <= levels.keys():
        why = "no kernels are known that all have: name hosts that are alike, or use bits any"
        return {}, f"ranks with other bits will be refused, as {why}"
    oldest = X86_KERNELS[min(levels[kernel] for kernel in kernels)][0]
    common = set.intersection(*(set(own.simd) for own in facts.values()))
    # numpy does not start if it is to disable a feature of its baseline, and warns of one that the
    # processor has not: `simd` has neither.
    variables = {
        host: {
            "OPENBLAS_CORETYPE": oldest,
            "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in own.simd if name not in common),
        }
        for host, own in facts.items()
    }
    return variables, f"all use the kernels of {oldest}"
