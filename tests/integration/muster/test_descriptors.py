"""An agent may have many files open, and its ranks as many as they would have had without it."""

import resource
import subprocess
import sys

import pytest

from muster.descriptors import DescriptorLimits, TooFewDescriptors

RAISES_AND_STARTS = """
import resource, subprocess, sys
from muster.descriptors import DescriptorLimits
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


def test_more_ranks_than_there_are_descriptors_for_are_refused() -> None:
    limits = DescriptorLimits(soft=16, hard=72)
    limits.refuse_too_many(16)
    with pytest.raises(TooFewDescriptors, match=r"17 takes 75 open files, .* `ulimit -n 75`"):
        limits.refuse_too_many(17)
    DescriptorLimits(soft=16, hard=resource.RLIM_INFINITY).refuse_too_many(17)
