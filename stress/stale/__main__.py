"""Hosts that freeze, are replaced and resume: nothing that resumes there may have an effect.

``python -m stress.stale [WAKINGS] [SEED]`` trains jobs of every kind on one host after the other
(`frozen_hosts`). Each host is frozen at a chosen moment; the next one takes over its jobs, trains
and saves; then the old ranks, agents and coordinator resume. All of them must notice and exit in
time, without changing a checkpoint, `LATEST`, a row or shared memory in use. The exit code is 1 if
any of that fails, or if not all processes were resumed within `--minutes`.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stress.stale.findings import IN_TIME_SECONDS, Findings, report
from stress.stale.jobs import KINDS
from stress.stale.scene import Scene
from tests.support.installation import Installation

EPOCHS = 80


def run(
    root: Path,
    *,
    wakings: int,
    seed: int,
    minutes: float,
    tell: Callable[[str], object],
    in_time_seconds: float = IN_TIME_SECONDS,
    epochs: int = EPOCHS,
) -> Findings:
    """Wake so many stale ranks; return what was found. That the time is over first is a breach.

    `epochs` is how long a job is: one goes through several machines, or over one change of them.
    """
    findings = Findings(in_time_seconds=in_time_seconds)
    installation = Installation(root)
    until = time.monotonic() + 60 * minutes
    with Scene(installation, seed, findings, epochs) as scene:
        scene.begin()
        while (woken := len(findings.of(*KINDS))) < wakings and time.monotonic() < until:
            scene.replace_a_host()
            tell(f"{len(findings.of(*KINDS))} of {wakings} stale ranks woken")
        scene.finish()
    if not findings.memories:
        findings.breaches.append("no shared memory was seen at all")
    if woken < wakings:
        findings.breaches.append(f"only {woken} of {wakings} were woken in {minutes:g} minutes")
    return findings


def tell(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    """Return 1 if anything was found that must not be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wakings", type=int, nargs="?", default=200, help="of stale ranks (200)")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="decides where they stop (0)")
    parser.add_argument("--minutes", type=float, default=20.0, help="at most (20)")
    asked = vars(parser.parse_args())
    # Asked to end, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as directory:
        findings = run(Path(directory), **asked, tell=tell)
    for line in (f"seed {asked['seed']}", *report(findings)):
        tell(line)
    return bool(findings.breaches)


if __name__ == "__main__":
    sys.exit(main())
