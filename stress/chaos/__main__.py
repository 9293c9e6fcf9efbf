"""Inject faults into every process of a whole installation.

``python -m stress.chaos [--faults 300] [--seed 7] [--minutes 20]`` runs in a new installation,
prints a report, and exits with 1 if a check fails. ``--only coordinator:kill`` draws only these
faults (separate several with commas). The seed decides the jobs, the faults and their order.
Which of several processes a fault hits, and at which instruction, also depends on the machine, so
it can take a second run to reproduce a failure.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from stress.chaos.checks import Digests, Outcome, digests_of
from stress.chaos.faults import Choice, Victim, blows, choices_of
from stress.chaos.figures import Event, History
from stress.chaos.jobs import KINDS, Training, Workload, fields_of
from stress.chaos.leases import Office
from stress.chaos.observer import Observer
from stress.chaos.report import Report, facts_of
from stress.chaos.scene import Scene
from stress.chaos.strikes import Striker
from tests.support.installation import Installation

SLOW_SECONDS = 0.05
"""Duration of one step while faults are injected."""
HEARTBEAT_TIMEOUT = 3.0
START_GRACE_SECONDS = 15.0
"""A rank that is frozen before its first heartbeat is replaced after this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    faults: int = 300
    seed: int = 0
    minutes: float = 20.0
    """No fault is injected later than this."""
    jobs: int = 3
    """Number of concurrent training jobs."""
    steps: int = 300
    """Steps of each job, about."""
    coordinators: int = 2
    """1, or 2 for an active coordinator and a standby."""
    only: tuple[Choice, ...] = ()
    """The faults to draw from; if empty, all by their weights."""

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Parse a command line; exits the process if it is invalid."""
        parser = argparse.ArgumentParser(
            prog="python -m stress.chaos", description=__doc__.splitlines()[0]
        )
        for name, what in NUMBERS.items():
            parser.add_argument(
                f"--{name}", type=int, default=DEFAULTS[name], help=f"{what} (%(default)s)"
            )
        parser.add_argument(
            "--coordinators",
            type=int,
            choices=(1, 2),
            default=DEFAULTS["coordinators"],
            help="1, or 2 for an active one and a standby (%(default)s)",
        )
        parser.add_argument(
            "--minutes",
            type=float,
            default=DEFAULTS["minutes"],
            help="when they are over no more faults strike; jobs are finished, and all is checked "
            "(%(default)g)",
        )
        parser.add_argument(
            "--only",
            metavar="VICTIM:FAULT,...",
            default="",
            help="draw from these faults alone, for example coordinator:kill,agent:term (all of "
            "them, by their weights)",
        )
        asked = vars(parser.parse_args(words))
        try:
            asked["only"] = choices_of(asked["only"]) if asked["only"] else ()
        except ValueError as error:
            parser.error(str(error))
        return cls(**asked)

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        only = ",".join(f"{victim}:{kind}" for victim, kind in self.only)
        return (
            f"python -m stress.chaos --faults {self.faults} --seed {self.seed} "
            f"--minutes {self.minutes:g} --jobs {self.jobs} --steps {self.steps} "
            f"--coordinators {self.coordinators}"
        ) + (f" --only {only}" if only else "")

    @property
    def kinds(self) -> list[str]:
        """The kinds of jobs; with few jobs, not every kind is used."""
        return list(KINDS)[: max(2, self.jobs + 1)]

    def fields(self, kind: str, sleep_seconds: float) -> dict[str, Any]:
        return {
            **fields_of(kind, self.steps),
            "sleep_sec": sleep_seconds,
            "heartbeat_timeout": HEARTBEAT_TIMEOUT,
            "start_grace_seconds": START_GRACE_SECONDS,
            # All faults are injected, so the restart budget must not run out.
            "max_restarts": 1_000_000,
        }


DEFAULTS = {each.name: each.default for each in fields(Plan)}
NUMBERS = {
    "faults": "largest number of faults",
    "seed": "decides the jobs, the faults and their order",
    "jobs": "concurrent training jobs",
    "steps": "steps per job, about",
}


def run(plan: Plan, root: Path, say: Callable[[str], None]) -> Report:
    """Run all of it in a new installation below `root`."""
    write_dataset(root / "shards", synthetic(samples=512, shards=8, features=8))
    with Installation(root) as installation:
        undisturbed = {kind: _undisturbed(installation, plan, kind) for kind in plan.kinds}
        observer = Observer(installation)
        wanted = {kind: plan.fields(kind, SLOW_SECONDS) for kind in plan.kinds}
        workload = Workload(installation, observer, width=plan.jobs, seed=plan.seed, fields=wanted)
        office = Office(installation)
        striker = Striker(installation, workload, observer, office, say)
        began_at = time.monotonic()
        with Scene(
            installation, observer, workload, office, coordinators=plan.coordinators
        ) as scene:
            for blow in blows(plan.faults, plan.seed, plan.only):
                if time.monotonic() > began_at + 60 * plan.minutes:
                    break
                striker.strike(blow)
                scene.meet_new_jobs()
            left = scene.come_to_rest()
            history = _history(scene, striker)
            outcome = Outcome(
                scene=scene,
                striker=striker,
                undisturbed=undisturbed,
                history=history,
                left=left,
            )
            return Report(
                history=history,
                breaches=outcome.breaches(),
                facts=facts_of(scene, striker, seconds=time.monotonic() - began_at),
                replay=plan.command,
            )


def _undisturbed(installation: Installation, plan: Plan, kind: str) -> Digests:
    """Run a job without faults and pauses; return its digests."""
    job_id = installation.submit(**plan.fields(kind, 0.0))
    installation.complete(job_id)
    return digests_of(
        installation, Training(job_id=job_id, uid=installation.uids[job_id], kind=kind)
    )


def _history(scene: Scene, striker: Striker) -> History:
    return History(
        strikes=striker.strikes,
        looks=scene.observer.looks,
        events={
            it.job_id: [Event.read(event) for event in scene.installation.events(it.job_id)]
            for it in scene.workload.trainings
        },
        ends={
            Victim.API: scene.api_restarter.ends,
            Victim.COORDINATOR: [term.at for term in scene.office.terms],
        },
        kinds={it.job_id: it.kind for it in scene.workload.trainings},
    )


def main() -> int:
    plan = Plan.of(sys.argv[1:])
    # On SIGTERM, end all processes that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as directory:
        try:
            report = run(plan, Path(directory), _say)
        except BaseException:
            _say(f"again:  {plan.command}")
            raise
    for line in report.lines():
        _say(line)
    return 1 if report.has_failed else 0


def _say(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main())
