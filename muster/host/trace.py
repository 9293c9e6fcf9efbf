"""A trace of moments across all processes, to see where the time of a start or a recovery goes.

Off unless MUSTER_TRACE names a file. `python -m bench.timeline FILE` reads it.
"""

import os
import time
from contextlib import suppress
from typing import Final

import msgspec

from muster.contracts.settings.names import PROCESS_TAG
from muster.contracts.settings.variables import TRACE

_FILE: Final = os.path.expanduser(os.environ.get(TRACE.name, "")) or None  # noqa: PTH111


def stamp(event: str, **facts: object) -> None:
    """Append one line: `event` with the monotonic time, the pid, the process tag and `facts`.

    Does nothing, and takes less than 100 ns, while the trace is off.
    """
    if _FILE is not None:
        tag = os.environ.get(PROCESS_TAG, "").rstrip()
        line = {"event": event, "time": time.monotonic(), "pid": os.getpid(), "tag": tag, **facts}
        with suppress(OSError), open(_FILE, "ab", buffering=0) as file:  # noqa: PTH123  10 us less
            file.write(msgspec.json.encode(line) + b"\n")
