"""A contained process that has left its session and its environment."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ENCLOSED = """
import os, sys
from muster.host.containment import contain_self
contain_self(sys.argv[1])
{then}
os.setsid()
print("up", flush=True)
os.execve("/bin/sleep", ["sleep", "600"], {{}})
"""


@contextmanager
def enclosed(mark: str, *, then: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run one; `then` is Python that runs after containment."""
    command = [sys.executable, "-c", ENCLOSED.format(then=then), mark]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()
