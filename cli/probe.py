"""Whether a directory can be written to, which only writing tells: a disk may be full."""

import tempfile
from pathlib import Path
from typing import Final

PROBE_BYTES: Final = 1 << 16
"""More than fits into what is left of a block."""


def write_probe(directory: Path) -> None:
    """Write there, and leave nothing; raises `OSError`."""
    with tempfile.TemporaryFile(dir=directory) as probe:
        probe.write(bytes(PROBE_BYTES))
        probe.flush()
