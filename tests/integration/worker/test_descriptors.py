"""An agent may have many files open, and its ranks as many as they would have had without it."""

import resource
import subprocess
import sys

from worker.descriptors import DescriptorLimits

RAISES_AND_STARTS = """
import resource, subprocess, sys
from worker.descriptors import DescriptorLimits
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
limits = DescriptorLimits.raised()
print(*limits, *resource.getrlimit(resource.RLIMIT_NOFILE))
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
limits.impose(child.pid)
print(*resource.prlimit(child.pid, resource.RLIMIT_NOFILE))
child.communicate()
limits.impose(child.pid)
"""


def test_what_an_agent_takes_it_does_not_pass_on() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    out = subprocess.run(
        [sys.executable, "-c", RAISES_AND_STARTS], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == ["64 128 128 128", "64 128"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
    assert DescriptorLimits(*before) == before
