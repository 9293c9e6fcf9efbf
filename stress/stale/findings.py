"""The results of resumed stale processes, and every violation."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from cli.output import table

IN_TIME_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waking:
    """A stale process that was resumed."""

    what: str
    instant: str
    outcome: str
    seconds: float
    """Until it was gone."""


@dataclass(slots=True)
class Findings:
    """Counts, and one sentence per fault."""

    wakings: list[Waking] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    completed: int = 0
    commits: int = 0
    """Checkpoints that were read and verified; none may be older than the one before."""
    inside_transactions: int = 0
    """Coordinators that were stopped there, and again a moment later."""
    memories: int = 0
    """How often both hosts had shared memory to compare; 0 would prove nothing."""
    in_time_seconds: float = IN_TIME_SECONDS
    """Time for resumed processes to exit."""

    def note(self, waking: Waking) -> None:
        self.wakings.append(waking)
        if self.is_late(waking):
            self.faults.append(f"{waking.what}: gone only {waking.seconds:.2f} s after it woke")

    def note_memory(self, stale: set[int], in_use: set[int]) -> None:
        """Check whether stale ranks can write to memory that others have mapped."""
        self.memories += bool(stale and in_use)
        if both := stale & in_use:
            self.faults.append(f"stale ranks can write to memory in use: {both}")

    def is_late(self, waking: Waking) -> bool:
        return waking.seconds > self.in_time_seconds

    def of(self, *whats: str) -> list[Waking]:
        return [waking for waking in self.wakings if waking.what in whats]


def figures(findings: Findings) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Waking]] = defaultdict(list)
    for waking in findings.wakings:
        groups[waking.what, waking.instant].append(waking)
    rows = []
    for (what, instant), wakings in sorted(groups.items()):
        seconds = sorted(waking.seconds for waking in wakings)
        tail = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
        spread = f"{statistics.median(seconds):.2f} / {tail:.2f} / {seconds[-1]:.2f} s"
        counts = Counter(waking.outcome for waking in wakings)
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        rows.append((what, instant, len(wakings), spread, outcomes))
    yield from table(("woken", "stopped", "count", "gone after p50 / p95 / max", "outcomes"), rows)
    late = sum(map(findings.is_late, findings.wakings))
    yield f"later than {findings.in_time_seconds:g} s: {late} of {len(findings.wakings)}"
    yield f"jobs completed with the bits of an undisturbed run: {findings.completed}"
    yield f"checkpoints read and verified: {findings.commits}"
    yield f"stopped inside a transaction, let out of it: {findings.inside_transactions}"
