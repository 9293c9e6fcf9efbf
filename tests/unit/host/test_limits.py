import subprocess
import sys

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
