"""Has nodes of a household probe each other over lossy links, and switches off rule after rule.

``python -m stress.health [HOURS] [SEED]``: 10 simulated nodes lose a fifth of their packets each
way, and each of their links breaks once in ten minutes, for up to 20 s. In one history all of them
run, and none may be removed. In the other one links break once a minute, and a node is stopped for
a minute every ten minutes: it has to be removed in time, and may remove none when it goes on. Nodes
that die are removed within 31 s, with the fast preset within 6 s. With any of the rules switched
off the histories have to find a fault.
"""

from functools import partial
from multiprocessing import Pool
from pathlib import Path

from muster.mesh.health import PRESETS
from stress.runner import Report, main
from tests.support.probes import WITHOUT, Play, faults_of_loss, faults_of_stops, silence_seconds

HISTORY_SECONDS = 3600.0
"""Histories of an hour, so that all processors play some."""
DEATHS = 200
BREAK_SECONDS = 600.0
"""Once a minute is too much: then one node of ten that run was removed in 24 hours."""


def run(_directory: Path, hours: int = 24, seed: int = 0) -> Report:
    """Play so many hours of each kind."""
    report, seeds = Report(), range(seed, seed + hours)
    with Pool() as pool:  # ends its processes at once, also on SIGTERM
        plays: dict[str, Play] = {
            "all nodes run": partial(faults_of_loss, break_every_seconds=BREAK_SECONDS),
            "nodes are stopped": faults_of_stops,
        }
        for name, play in plays.items():
            found = pool.imap(partial(play, seconds=HISTORY_SECONDS), seeds)
            for each, faults in zip(seeds, found, strict=True):
                report.faults += [f"{name}, seed {each}: {fault}" for fault in faults]
            report.lines.append(f"{hours} hours in which {name}")
        for preset, limit in ("default", 31.0), ("fast", 6.0):
            silent = partial(silence_seconds, preset=PRESETS[preset])
            longest = max(pool.imap(silent, range(seed, seed + DEATHS)))
            report.lines.append(f"{preset}: a dead node is removed after {longest:.1f} s at most")
            if longest > limit:
                report.faults.append(f"{preset}: longer than {limit} s")
        for rule, play in WITHOUT.items():
            found = pool.imap(partial(play, seconds=HISTORY_SECONDS), seeds)
            caught = next((number for number, faults in enumerate(found, 1) if faults), None)
            if caught is None:
                report.faults.append(f"nothing found fault without {rule}")
            else:
                report.lines.append(f"without {rule}: history {caught} finds the fault")
    return report


if __name__ == "__main__":
    main(run)
