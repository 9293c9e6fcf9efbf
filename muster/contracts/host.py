"""What a host says about itself."""

from typing import Annotated

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
