"""GPUs that only `nvidia-smi` knows: a script of that name, first on a PATH."""

import uuid
from collections.abc import Sequence
from pathlib import Path


def install_gpus(directory: Path, count: int) -> list[str]:
    """Write a `nvidia-smi` that lists so many GPUs, and return their UUIDs, which are new."""
    uuids = [f"GPU-{uuid.uuid4()}" for _ in range(count)]
    write_nvidia_smi(directory, "".join(f"echo {each}\n" for each in uuids))
    return uuids


def show_use(directory: Path, uuids: Sequence[str], free: str = "", used: str = "") -> None:
    """Write a `nvidia-smi` that lists these GPUs and answers with these lines what is in use."""
    lists = "".join(f"echo {each}\n" for each in uuids)
    write_nvidia_smi(
        directory,
        "case $1 in\n"
        f"--query-gpu=uuid,memory.free) printf '{free}';;\n"
        f"--query-compute-apps=*) printf '{used}';;\n"
        f"*) {lists};;\nesac\n",
    )


def write_nvidia_smi(directory: Path, lines: str) -> None:
    directory.mkdir(exist_ok=True)
    script = directory / "nvidia-smi.new"
    script.write_text(f"#!/bin/sh\n{lines}")
    script.chmod(0o755)
    script.rename(directory / "nvidia-smi")  # an agent may be running it
