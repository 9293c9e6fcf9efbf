"""Random schedules over real processes: ranks come, go, stand still and die, and no bit differs.

``python -m stress.elastic_schedules [SCHEDULES] [SEED] [--backend shared_memory|tcp]`` runs as many
as you like in a new installation, with at least ten kills each. Schedule i has the seed SEED + i;
one that failed is run again alone by ``1 SEED``.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset
from muster.host.processes import identify, send_signal
from tests.support.installation import Installation, await_value
from tests.support.pools import PooledJob

KILLS = 10
OTHERS = 12
"""Things that happen beside the kills."""

LEAST_WORKERS, MOST_WORKERS = 3, 6
"""Of those asked for. With fewer, all kills meet the same ranks, and the backoff is long."""
LONG: dict[str, Any] = {"epochs": 60, "max_workers": MOST_WORKERS, "heartbeat_timeout": 2}
SLOW_SECONDS = 0.05
"""Of one virtual shard: far more steps than a schedule lasts."""

GOOD_ENDS = ("exited with code 0", "was ended by signal 15 (SIGTERM)")
"""A newcomer that is not wanted any more may be asked to go before it can listen."""

PAUSES_SECONDS = (0.0, 0.0, 0.2, 0.5, 1.5)
"""Between two events: some come on top of each other."""


@dataclass
class Schedule:
    """One job, and what chance does to it."""

    installation: Installation
    seed: int
    backend: str
    kills: int = KILLS
    others: int = OTHERS
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)  # noqa: S311  can be repeated, no secret
        self._victims: set[int] = set()

    def runs(self) -> str:
        """Act it all out; return the digest of the end."""
        world_size = self._chance.randint(LEAST_WORKERS, 4)
        self._job = PooledJob(
            self.installation,
            pace_seconds=SLOW_SECONDS,
            world_size=world_size,
            backend=self.backend,
            **LONG,
        )
        self._job.wait_for_steps(1)
        kinds = [
            self._grows,
            self._shrinks,
            self._lets_go,
            self._holds,
            self._naps,
            self._freezes,
            self._all_die,
        ]
        events = [self._kills] * self.kills
        events += self._chance.choices(kinds, [3, 2, 2, 2, 2, 1, 1], k=self.others)
        self._chance.shuffle(events)
        for event in events:
            assert not self._job.is_over(), "the job is over too early: give it more to do"
            event()
            time.sleep(self._chance.choice(PAUSES_SECONDS))
        digest = self._job.completes()
        self._nobody_else_failed()
        return digest

    # What happens

    def _kills(self) -> None:
        self._signals(self._somebody(), signal.SIGKILL)

    def _all_die(self) -> None:
        for worker in self._job.active():
            self._signals(worker, signal.SIGKILL)

    def _grows(self) -> None:
        self._scales(self._chance.randint(1, 3))

    def _shrinks(self) -> None:
        self._scales(-self._chance.randint(1, 3))

    def _lets_go(self) -> None:
        """A refusal, because one is the last or is gone by now, is an answer, too."""
        worker = self._somebody()
        path = f"/jobs/{self._job.job_id}/workers/{worker}/leave"
        answer = self.installation.request("POST", path)
        assert answer.is_success or answer.is_client_error, answer.text
        self.done["leave" if answer.is_success else "leave refused"] += 1

    def _holds(self) -> None:
        self.done["pause"] += 1
        self._job.pauses()
        if self._chance.random() < 1 / 2:
            self._job.wait_for_status("PAUSED")
        if self._chance.random() < 1 / 3 and self._job.active():
            self._kills()
        self._job.resumes()

    def _naps(self) -> None:
        """Stand still, but not for long."""
        worker = self._somebody()
        process = identify(self._job.active().get(worker, 0))
        if self._signals(worker, signal.SIGSTOP):
            time.sleep(self._chance.uniform(0.05, 0.5))
            # By its process: it may be on its way out by now, and must be able to go.
            if process is not None and send_signal(process, signal.SIGCONT):
                self.done["SIGCONT"] += 1

    def _freezes(self) -> None:
        """Stand still until somebody does something about it."""
        worker = self._somebody()
        if self._signals(worker, signal.SIGSTOP):
            self._victims.add(worker)
            self.done["freeze"] += 1

    def _scales(self, difference: int) -> None:
        wanted = self.installation.see(self._job.job_id)["world_size"] + difference
        self._job.scales(min(MOST_WORKERS, max(LEAST_WORKERS, wanted)))
        self.done["grow" if difference > 0 else "shrink"] += 1

    def _somebody(self) -> int:
        """Wait until there is anybody to be chosen, who is neither dead nor frozen already."""
        look = lambda: sorted(set(self._job.active()) - self._victims)  # noqa: E731  says it all
        workers = await_value(look, lambda: self.installation.describe(self._job.job_id))
        return self._chance.choice(workers)

    def _signals(self, worker: int, number: signal.Signals) -> bool:
        try:
            self._job.signals(worker, number)
        except (KeyError, ProcessLookupError):
            return False  # gone meanwhile, for its own reasons
        if number is signal.SIGKILL:
            self._victims.add(worker)
        self.done[number.name] += 1
        return True

    # What must hold

    def _nobody_else_failed(self) -> None:
        """A process ended badly only if we did it: a death disturbs nobody else."""
        ends = [
            event["message"]
            for event in self.installation.events(self._job.job_id)
            if event["kind"] == "rank_exited" and not event["message"].endswith(GOOD_ENDS)
        ]
        described = self.installation.describe(self._job.job_id)
        assert len(ends) <= len(self._victims), f"{ends}\n{described}"


def undisturbed(installation: Installation) -> str:
    """Return the digest of one rank that trains in peace."""
    return PooledJob(installation, world_size=1, epochs=LONG["epochs"]).completes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("schedules", type=int, nargs="?", default=20, help="how many (20)")
    parser.add_argument("seed", type=int, nargs="?", default=0, help="of the first schedule (0)")
    parser.add_argument(
        "--backend",
        choices=["shared_memory", "tcp"],
        default="shared_memory",
        help="what ranks meet by (%(default)s)",
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        installation = Installation(Path(directory))
        write_dataset(installation.root / "shards", synthetic(samples=512, shards=8, features=8))
        with installation:
            right = undisturbed(installation)
            failed = [
                seed
                for seed in range(asked.seed, asked.seed + asked.schedules)
                if not _holds(Schedule(installation, seed, asked.backend), right)
            ]
    for seed in failed:
        _say(f"again: python -m stress.elastic_schedules 1 {seed} --backend {asked.backend}")
    _say(f"{asked.schedules - len(failed)} of {asked.schedules} schedules: the same bits")
    return 1 if failed else 0


def _holds(schedule: Schedule, right: str) -> bool:
    began_at = time.monotonic()
    try:
        digest = schedule.runs()
        assert digest == right, f"other bits: {digest} instead of {right}"
    except AssertionError as error:
        _say(f"seed {schedule.seed} FAILED after {dict(schedule.done)}\n{error}")
        return False
    counts = ", ".join(f"{kind} {count}" for kind, count in sorted(schedule.done.items()))
    _say(f"seed {schedule.seed}  {time.monotonic() - began_at:5.1f} s  {counts}")
    return True


def _say(sentence: str) -> None:
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main())
