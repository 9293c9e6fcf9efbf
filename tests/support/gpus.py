"""GPUs that only `nvidia-smi` knows: a script of that name, first on a PATH."""

import uuid
from pathlib import Path


def install_gpus(directory: Path, count: int) -> list[str]:
    """Write a `nvidia-smi` that lists so many GPUs, and return their UUIDs, which are new."""
    uuids = [f"GPU-{uuid.uuid4()}" for _ in range(count)]
    write_nvidia_smi(directory, "".join(f"echo {each}\n" for each in uuids))
    return uuids


def write_nvidia_smi(directory: Path, lines: str) -> None:
    directory.mkdir(exist_ok=True)
    script = directory / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{lines}")
    script.chmod(0o755)
