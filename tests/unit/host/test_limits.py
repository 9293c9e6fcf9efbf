import resource
import subprocess
import sys

import pytest

from muster.host.limits import ShellLimits, TooFewOpenFiles

RAISE_AND_START = """
import resource, subprocess, sys
from muster.host.limits import ShellLimits
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
limits = ShellLimits.replaced()
print(*limits[:2], *resource.getrlimit(resource.RLIMIT_NOFILE))
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
limits.apply_to(child.pid)
print(*resource.prlimit(child.pid, resource.RLIMIT_NOFILE))
child.communicate()
limits.apply_to(child.pid)
"""


def test_a_raised_limit_is_not_passed_on_to_ranks() -> None:
    out = subprocess.run(
        [sys.executable, "-c", RAISE_AND_START], capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == ["64 128 128 128", "64 128"]


def test_more_ranks_than_open_files_allow_are_refused() -> None:
    limits = ShellLimits(soft=16, hard=72)
    limits.refuse_too_many(16)
    with pytest.raises(TooFewOpenFiles, match=r"17 needs 75 open files, .* `ulimit -n 75`"):
        limits.refuse_too_many(17)
    ShellLimits(soft=16, hard=resource.RLIM_INFINITY).refuse_too_many(17)
