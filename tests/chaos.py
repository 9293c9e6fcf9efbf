"""Kill anything: a whole installation at work, and faults for every process of it.

``python tests/chaos.py [--faults 300] [--seed 7] [--minutes 25]`` runs in a new installation,
prints a report, and exits with 1 if anything that must hold does not. The seed decides the jobs,
the faults and their order; whom of several processes a fault meets, and at which instruction,
depends on the machine as well, so a failure may need a second run to show again.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_checks import Digests, Outcome, digests_of
from chaos_faults import blows
from chaos_figures import Event, History
from chaos_jobs import KINDS, Training, Workload, fields_of
from chaos_observer import Observer
from chaos_report import Report, facts_of
from chaos_scene import Scene
from chaos_strikes import Striker
from installation import Installation

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset

SLOW_SECONDS = 0.05
"""Of one step, while there are faults."""
HEARTBEAT_TIMEOUT = 3.0
START_GRACE_SECONDS = 15.0
"""A rank that is frozen before its first beat is given up after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    faults: int = 300
    seed: int = 0
    minutes: float = 25.0
    """No fault strikes later than that."""
    jobs: int = 3
    """Trainings at once."""
    steps: int = 300
    """Of each of them."""

    @property
    def command(self) -> str:
        return (
            f"python tests/chaos.py --faults {self.faults} --seed {self.seed} "
            f"--minutes {self.minutes:g} --jobs {self.jobs} --steps {self.steps}"
        )

    @property
    def kinds(self) -> list[str]:
        """What is trained: of few jobs not every kind gets its turn."""
        return list(KINDS)[: max(2, self.jobs + 1)]

    def fields(self, kind: str, sleep_seconds: float) -> dict[str, Any]:
        return {
            **fields_of(kind, self.steps),
            "sleep_sec": sleep_seconds,
            "heartbeat_timeout": HEARTBEAT_TIMEOUT,
            "start_grace_seconds": START_GRACE_SECONDS,
            # Every fault is ours, so nobody gives up.
            "max_restarts": 1_000_000,
        }


def run(plan: Plan, root: Path, say: Callable[[str], None]) -> Report:
    """Run all of it in a new installation below `root`."""
    write_dataset(root / "shards", synthetic(samples=512, shards=8, features=8))
    with Installation(root) as installation:
        undisturbed = {kind: _undisturbed(installation, plan, kind) for kind in plan.kinds}
        observer = Observer(installation)
        fields = {kind: plan.fields(kind, SLOW_SECONDS) for kind in plan.kinds}
        workload = Workload(installation, observer, width=plan.jobs, seed=plan.seed, fields=fields)
        striker = Striker(installation, workload, observer, say)
        began_at = time.monotonic()
        with Scene(installation, observer, workload) as scene:
            for blow in blows(plan.faults, plan.seed):
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
    """Run a training in peace and in a hurry; return what it comes to."""
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
        ends={victim: restarter.ends for victim, restarter in scene.restarters.items()},
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("faults", 300), ("seed", 0), ("jobs", 3), ("steps", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--minutes", type=float, default=25.0)
    plan = Plan(**vars(parser.parse_args()))
    # Asked to end, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as directory:
        report = run(plan, Path(directory), _say)
    for line in report.lines():
        _say(line)
    return 1 if report.has_failed else 0


def _say(sentence: str) -> None:
    print(sentence, flush=True)  # noqa: T201  it is what this program is for


if __name__ == "__main__":
    sys.exit(main())
