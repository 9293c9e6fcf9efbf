"""What another process uses, as the kernel counts it."""

import time
from pathlib import Path


def memory_bytes(pid: int, field: str) -> int:
    """Return what its status says: of memory in use as `VmRSS`, of the most ever as `VmHWM`."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise LookupError(field)


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and of all threads that it ever had."""
    # As clock_getcpuclockid(3) makes the number of the clock of another process.
    return time.clock_gettime(~pid << 3 | 2)
