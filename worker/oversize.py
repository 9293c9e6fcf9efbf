"""What the kernel hands over to a process at most, and what is said of a rank that needs more.

The kernel names the interpreter, which is not the matter: it is the environment. What a rank is
given lies on top of what the agent has from the service, and both count.
"""

import errno
import os
from collections.abc import Mapping
from typing import Final

ALL_BYTES_MAX: Final = 6 << 20
ONE_BYTES_MAX: Final = 128 << 10
POINTER_BYTES: Final = 9
"""What Linux takes at most, of all and of one string, and what each costs besides: execve(2)."""


def oversize(environment: Mapping[str, str], given: Mapping[str, str]) -> OSError:
    """Return the error of a start with too large an environment, in figures and without a value.

    `given` is what the rank's own order says of it; the rest is the service's.
    """
    sizes = _sizes(environment)
    own = sum(_sizes(given).values())
    longest = max(sizes, key=sizes.__getitem__, default="")
    limit = min(os.sysconf("SC_ARG_MAX"), ALL_BYTES_MAX)
    said = (
        f"the environment is {sum(sizes.values())} bytes, of which env, secrets and what Muster "
        f"adds are {own}, and the service's own variables the rest; the longest is {longest} with "
        f"{sizes.get(longest, 0)}. With the command the system takes {limit}, of which "
        f"{ONE_BYTES_MAX} in one: hand over a file's path in place of its content"
    )
    return OSError(errno.E2BIG, said)


def _sizes(environment: Mapping[str, str]) -> dict[str, int]:
    return {
        name: len(os.fsencode(f"{name}={value}")) + POINTER_BYTES
        for name, value in environment.items()
    }
