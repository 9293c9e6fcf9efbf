import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from muster.host.limits import CGROUPS, memory_limits, usable_processors

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


# What a container or an allocation allows

MB = 1 << 20
V2 = "0::/pod/ranks\n"
V1 = "5:cpuset:/\n4:cpu,cpuacct:/pod/ranks\n3:memory:/pod/ranks\n0::/\n"
CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("membership", "files", "processors", "memory"),
    [
        (V2, {"pod/ranks/cpu.max": "max 100000"}, CORES, []),
        (V2, {"pod/ranks/cpu.max": "50000 100000"}, 1, []),
        (V2, {"pod/ranks/cpu.max": "max 1", "pod/cpu.max": "100000 100000"}, 1, []),
        (V2, {"cpu.max": "10000 100000"}, 1, []),  # the path is that of another namespace
        (V2, {"pod/ranks/cpu.max": "99000000 100000"}, CORES, []),
        (V1, {"cpu/pod/cpu.cfs_quota_us": "-1", "cpu/pod/cpu.cfs_period_us": "1000"}, CORES, []),
        (V1, {"cpu/cpu.cfs_quota_us": "900", "cpu/cpu.cfs_period_us": "1000"}, 1, []),
        (
            V2,
            {
                "pod/ranks/memory.max": "max",
                "pod/ranks/memory.current": "1",
                "pod/ranks/memory.stat": "anon 1",
                "pod/memory.max": str(500 * MB),
                "pod/memory.current": str(300 * MB),
                "pod/memory.stat": f"anon {200 * MB}\ninactive_file {100 * MB}\n",
            },
            CORES,
            [(500 * MB, 300 * MB)],
        ),
        (
            V1,
            {
                "memory/pod/memory.limit_in_bytes": str(500 * MB),
                "memory/pod/memory.usage_in_bytes": str(300 * MB),
                "memory/pod/memory.stat": f"inactive_file 5\ntotal_inactive_file {100 * MB}\n",
            },
            CORES,
            [(500 * MB, 300 * MB)],
        ),
        ("", {}, CORES, []),
    ],
)
def test_cgroups_limit_processors_and_memory(
    tmp_path: Path,
    membership: str,
    files: dict[str, str],
    processors: int,
    memory: list[tuple[int, int]],
) -> None:
    place = tmp_path / "cgroup"
    place.write_text(membership)
    for name, content in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    assert usable_processors(place, tmp_path / "fs") == processors
    assert list(memory_limits(place, tmp_path / "fs")) == memory


@pytest.fixture
def cell() -> Iterator[list[Path]]:
    """The kernel's cgroups of half a processor and 256 MiB, of version 1 or 2."""
    name = f"muster-limits-{os.getpid()}"
    is_old = (CGROUPS / "cpu").is_dir()
    limits = (
        {"cpu/cpu.cfs_quota_us": "50000", "memory/memory.limit_in_bytes": str(256 * MB)}
        if is_old
        else {"cpu.max": "50000 100000", "memory.max": str(256 * MB)}
    )
    with ExitStack() as made:
        groups = []
        try:
            for path, limit in limits.items():
                group = CGROUPS / Path(path).parent / name
                if not group.exists():
                    group.mkdir()
                    made.callback(group.rmdir)
                    groups.append(group)
                (group / Path(path).name).write_text(limit)
        except OSError as error:
            pytest.skip(f"no cgroup can be made: {error}")
        yield groups


ASK = """
import sys
from pathlib import Path
for group in sys.argv[1:]:
    Path(group, "cgroup.procs").write_text("0")
from muster.host.limits import memory_limits, usable_processors
print(usable_processors(), *min(memory_limits()))
"""


def test_limits_of_the_kernel_are_seen_in_a_cgroup(cell: list[Path]) -> None:
    words = [sys.executable, "-c", ASK, *map(str, cell)]
    answer = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    processors, most, left = map(int, answer.split())
    assert (processors, most) == (1, 256 * MB)
    assert 200 * MB < left <= 256 * MB


def test_affinity_limits_processors() -> None:
    ask = "import os\nfrom muster.host.limits import usable_processors\n"
    ask += "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nprint(usable_processors())"
    words = [sys.executable, "-c", ask]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "1\n"
