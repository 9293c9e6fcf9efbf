"""Hosts that freeze, are replaced and resume: nothing that resumes there may have an effect.

``python -m stress.stale [WAKINGS] [SEED]`` trains jobs of every kind on one host after the other
(`frozen_hosts`). Each host is frozen at a chosen moment; the next one takes over its jobs, trains
and saves; then the old ranks, agents and coordinator resume. All of them must notice and exit in
time, without changing a checkpoint, `LATEST`, a row or shared memory in use. It also fails if not
all processes were resumed within `--minutes`.
"""

import time
from pathlib import Path

from stress.runner import Report, main, say
from stress.stale.findings import IN_TIME_SECONDS, Findings, figures
from stress.stale.hosts import MovingInstallation
from stress.stale.jobs import KINDS
from tests.support.installation import Installation


def run(
    directory: Path,
    wakings: int = 200,
    seed: int = 0,
    *,
    minutes: float = 20.0,
    seconds: float = IN_TIME_SECONDS,
    epochs: int = 80,
    spares: int = 1,
) -> Report:
    """Resume so many stale ranks, each of which has to exit within `seconds`.

    `epochs` is how long a job is: it outlasts several hosts, or one change of them. `spares` is how
    many spare processes each synchronous job has.
    """
    findings = Findings(in_time_seconds=seconds)
    until = time.monotonic() + 60 * minutes
    fields = {"epochs": epochs, "spare_ranks": spares}
    with MovingInstallation(Installation(directory), seed, findings, fields) as moving:
        moving.begin()
        while (woken := len(findings.of(*KINDS))) < wakings and time.monotonic() < until:
            moving.replace_host()
            say(f"{len(findings.of(*KINDS))} of {wakings} stale ranks woken")
        moving.finish()
    if not findings.memories:
        findings.faults.append("no shared memory was seen at all")
    if woken < wakings:
        findings.faults.append(f"only {woken} of {wakings} were woken in {minutes:g} minutes")
    if missing := {*KINDS, "agent", "coordinator"} - {it.what for it in findings.wakings}:
        findings.faults.append(f"never woken: {', '.join(missing)}")
    return Report(list(figures(findings)), findings.faults)


if __name__ == "__main__":
    main(run)
