"""Torch's own tests of `torch.distributed`, under gloo and under this process group.

``python -m stress.torch_suite [WORLD_SIZES] [--tests test_a,test_b]`` runs them with 2, 3, 4 and 8
ranks, and says how many pass, which fail under "muster" and pass under gloo, and what the suite
itself skips. It needs the package ``expecttest``; a machine without GPUs skips the tests of them.
"""

from collections import Counter
from pathlib import Path

from stress.runner import Report, main, say
from tests.support.torch_suite import Outcome, outcomes

REFUSED_BY_TORCH = {
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
}
"""`monitored_barrier` raises `ValueError` for every backend whose name is not gloo."""


def run(directory: Path, world_sizes: str = "2,3,4,8", *, tests: str = "") -> Report:  # noqa: ARG001
    """Compare both with each number of ranks."""
    report = Report()
    names = tests.split(",") if tests else []
    for world_size in map(int, world_sizes.split(",")):
        theirs = _played("gloo", world_size, names)
        passed = [name for name, it in theirs.items() if it.status == "passed"]
        ours = _played("muster", world_size, passed) if passed else {}
        missed = [it for it in ours.values() if it.status != "passed"]
        report.lines.append(
            f"{world_size} ranks: gloo passes {len(passed)} of {len(theirs)}, "
            f"muster {len(passed) - len(missed)} of these"
        )
        skips = Counter(it.detail for it in theirs.values() if it.status == "skipped")
        report.lines += [f"    {count} skipped: {why}" for why, count in skips.most_common()]
        report.lines += [
            f"    {it.test} fails under gloo" for it in theirs.values() if it.status == "failed"
        ]
        report.faults += [
            f"{it.test} with {world_size} ranks: {it.detail}"
            for it in missed
            if it.test not in REFUSED_BY_TORCH
        ]
    return report


def _played(backend: str, world_size: int, names: list[str]) -> dict[str, Outcome]:
    found = {}
    for it in outcomes(backend, world_size, names):
        say(f"{backend}  {world_size} ranks  {it.test}  {it.status}  {it.seconds:.1f} s")
        found[it.test] = it
    return found


if __name__ == "__main__":
    main(run)
