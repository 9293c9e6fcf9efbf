"""Evidence of the kernel's kills, read from files that look like its own."""

from pathlib import Path

import pytest

from worker.memory import OomKills

V2 = ("0::/job/ranks\n", "job/ranks/memory.events", "low 0\nmax 9\noom 3\noom_kill {}\n")
V1 = (
    "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n",
    "memory/job/memory.oom_control",
    "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
)


class Kernel:
    """A count that a test can raise."""

    def __init__(self, root: Path, layout: tuple[str, str, str]) -> None:
        self.membership, self.cgroups = root / "cgroup", root / "fs"
        groups, file, self._content = layout
        self.membership.write_text(groups)
        self._file = self.cgroups / file
        self._file.parent.mkdir(parents=True)
        self.has_killed(2)

    def has_killed(self, count: int) -> None:
        self._file.write_text(self._content.format(count))

    def watched(self) -> OomKills:
        return OomKills(self.membership, self.cgroups)


@pytest.mark.parametrize("layout", [V2, V1])
def test_a_kill_is_claimed_once(tmp_path: Path, layout: tuple[str, str, str]) -> None:
    kernel = Kernel(tmp_path, layout)
    kills = kernel.watched()
    assert not kills.claim(), "what was before is not ours"
    kernel.has_killed(4)
    assert [kills.claim() for _ in range(3)] == [True, True, False]


def test_without_a_count_there_is_no_evidence(tmp_path: Path) -> None:
    assert not OomKills(tmp_path / "absent", tmp_path).claim()
    kernel = Kernel(tmp_path, V2)
    kernel.membership.write_text("0::/elsewhere\n")
    assert not kernel.watched().claim()
