"""Has scripts of a household form groups while some of them die, and switches off rule after rule.

``python -m stress.mesh [JOINS] [SEED]``: in each history 2 to 7 scripts are needed for a group, up
to three more start, and they find each other late. Up to two links are renewed, and words lost;
in four of ten histories one to three messages end their sender or their receiver. One group has to
live at the end, and all have to know it. In as many histories a group loses a member, which comes
back in half of them, and the others meet anew while more scripts wait. With any of its rules
switched off the same histories have to find a fault.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from muster.mesh.forming import Forming
from stress.runner import Report, main
from tests.support.gatherings import WITHOUT, faults, faults_anew

CHUNK = 100


def run(_directory: Path, joins: int = 10_000, seed: int = 0) -> Report:
    """Play so many histories of each kind."""
    report, seeds = Report(), range(seed, seed + joins)
    with ProcessPoolExecutor() as pool:
        for name, play in ("form a group", faults), ("meet anew", faults_anew):
            found = list(zip(seeds, pool.map(play, seeds, chunksize=CHUNK), strict=True))
            report.faults += [f"{name}, seed {each}: {what}" for each, what in found if what]
            report.lines.append(f"{joins:,} histories in which scripts {name}")
        for rules in WITHOUT:
            caught = next(_caught(pool.map(partial(_plays, rules), seeds, chunksize=CHUNK)), None)
            if caught is None:
                report.faults.append(f"nothing found fault with {rules.__name__}")
            else:
                report.lines.append(f"{rules.__name__}: history {caught + 1:,} finds the fault")
    return report


def _plays(rules: type[Forming], seed: int) -> bool:
    return bool(faults(seed, rules) or faults_anew(seed, rules))


def _caught(results: Iterator[bool]) -> Iterator[int]:
    return (number for number, is_caught in enumerate(results) if is_caught)


if __name__ == "__main__":
    main(run)
