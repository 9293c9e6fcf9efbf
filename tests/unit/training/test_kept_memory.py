"""In a process of its own: what is set there cannot be taken back."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from muster.training.rank import keep_freed_memory

def step():
    arrays = [np.ones(1_000_000, np.float32) for _ in range(4)]

keep_freed_memory()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not the GNU C library")
def test_pages_of_one_step_serve_the_next() -> None:
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert int(told.stdout) < 1000  # one array alone has almost as many pages
