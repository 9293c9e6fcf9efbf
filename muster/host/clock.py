"""The clock by which processes of this machine judge others."""

import time
from typing import Final

# Darwin's monotonic clock goes on by itself.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def since_boot() -> float:
    """Return seconds that go on while the machine is suspended: others do not wait for it."""
    return time.clock_gettime(_CLOCK)
