"""Has nodes elect a master while all kinds of things fail, and switches off rule after rule.

``python -m stress.election [HISTORIES] [SEED]``: in each history 3 to 9 nodes start, and lose up to
40 % of all messages, get others twice or up to two seconds late. Nodes are killed, stopped,
suspended, restored from a backup, lose their disk or their permission to lead; their clocks differ
by up to a year, and jump; the network falls into parts, or loses single links and ways. When all
this is over each part has to have one master within 6 s. No node follows an older session or a
lower epoch than it has seen, and no epoch has two masters of one node. Then 20 histories of 50
nodes and 3 of 200. With any of the rules switched off its own history has to find a fault.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from muster.mesh.election import Election
from stress.runner import Report, main
from tests.support.elections import LIMIT_SECONDS, play
from tests.support.elections_without import WITHOUT

CHUNK = 20


def run(
    _directory: Path,
    histories: int = 10_000,
    seed: int = 0,
    *,
    fifties: int = 20,
    hundreds: int = 3,
) -> Report:
    """Play so many histories of 3 to 9 nodes, of 50, and of 200."""
    report = Report()
    with ProcessPoolExecutor() as pool:
        for size, number in (0, histories), (50, fifties), (200, hundreds):
            seeds = range(seed, seed + number)
            chunk = 1 if size else CHUNK
            played = list(pool.map(partial(_outcome, size), seeds, chunksize=chunk))
            _add(report, f"{size or '3 to 9'} nodes", seed, played)
    for rules, history in WITHOUT.items():
        if not history(rules):
            report.faults.append(f"nothing found fault with {rules.__name__}")
    report.lines.append(f"{len(WITHOUT)} rules, switched off in turn")
    return report


def _outcome(size: int, seed: int) -> tuple[float, list[str]]:
    world = play(seed, Election, size)
    return world.settled_seconds, world.faults


def _add(report: Report, what: str, seed: int, played: list[tuple[float, list[str]]]) -> None:
    report.faults += [
        f"{what}, seed {seed + number}: {found}"
        for number, (_, found) in enumerate(played)
        if found
    ]
    times = sorted(seconds for seconds, _ in played)
    if times:
        late = sum(seconds > LIMIT_SECONDS for seconds in times)
        p50, p99 = (times[int(share * (len(times) - 1))] for share in (0.5, 0.99))
        report.lines.append(
            f"{what}: one master {p50:.2f} s p50, {p99:.2f} s p99 after quiet, {late} of "
            f"{len(times):,} later than {LIMIT_SECONDS:.0f} s"
        )


if __name__ == "__main__":
    main(run)
