"""Whether the kernel has killed for lack of memory: the evidence that a SIGKILL alone is not.

It is counted per control group, ours and those below it: what else lives there can be mistaken for
a rank that is killed at the same time. Where the count cannot be read there is no evidence.
"""

from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
MEMBERSHIP: Final = Path("/proc/self/cgroup")

_COUNTER: Final = "oom_kill"


class OomKills:
    """The kills of our control group that nobody has been blamed for yet."""

    def __init__(self, membership: Path = MEMBERSHIP, cgroups: Path = CGROUPS) -> None:
        self._file = _counter_file(membership, cgroups)
        self._seen = self._count()

    def claim(self) -> bool:
        """Whether there was one since the start, or the last that was claimed."""
        if self._count() <= self._seen:
            return False
        self._seen += 1
        return True

    def _count(self) -> int:
        try:
            lines = "" if self._file is None else self._file.read_text()
        except OSError:
            return 0
        words = (line.split() for line in lines.splitlines())
        return next((int(word[1]) for word in words if word[:1] == [_COUNTER]), 0)


def _counter_file(membership: Path, cgroups: Path) -> Path | None:
    """Return where the kernel counts, in version 2 of control groups or else in version 1."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    groups = {
        kinds: place.lstrip("/") for _, kinds, place in (line.split(":", 2) for line in lines)
    }
    candidates = [cgroups / groups.get("", "") / "memory.events"]
    candidates += [
        cgroups / "memory" / place / "memory.oom_control"
        for kinds, place in groups.items()
        if "memory" in kinds.split(",")
    ]
    return next((file for file in candidates if file.is_file()), None)
