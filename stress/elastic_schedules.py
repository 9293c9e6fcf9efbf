"""Random schedules with real processes: ranks join, leave, stop and die; the bits stay the same.

``python -m stress.elastic_schedules [SCHEDULES] [SEED] [--backend shared_memory|tcp] [--spares 0]``
runs them in a new installation, with at least ten kills each, with or without spare processes.
Schedule i has the seed SEED + i; run one again alone with ``1 SEED``. ``--compression int8``, or
another kind, compresses the sums.
"""

import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.host.processes import identify, send_signal
from stress.runner import Report, chance, main, say
from tests.support.installation import Installation, await_value, write_small_dataset
from tests.support.pools import PooledJob

KILLS = 10
OTHERS = 12
"""Events other than kills."""

LEAST_WORKERS, MOST_WORKERS = 3, 6
"""World sizes. With fewer ranks, kills hit the same ranks and the backoff gets long."""
LONG: dict[str, Any] = {"epochs": 60, "max_workers": MOST_WORKERS, "heartbeat_timeout": 2}
DEADLINE_SECONDS = 300.0
"""For each wait: on a busy machine the last steps alone take more than a minute."""
SLOW_SECONDS = 0.05
"""Per virtual shard: far more steps than a schedule lasts."""

GOOD_ENDS = ("exited with code 0", "was ended by signal 15 (SIGTERM)")
"""A new worker that is no longer needed may get SIGTERM before it handles it."""

PAUSES_SECONDS = (0.0, 0.0, 0.2, 0.5, 1.5)
"""Between two events; some coincide."""


@dataclass
class Schedule:
    """One job and its random events."""

    installation: Installation
    seed: int
    backend: str = "shared_memory"
    spares: int = 1
    fields: dict[str, object] = field(default_factory=dict)
    """Of the job, those that its bits depend on."""
    kills: int = KILLS
    others: int = OTHERS
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._chance = chance(self.seed)
        self._victims: set[int] = set()

    def runs(self) -> str:
        """Run the schedule; return the final digest."""
        world_size = self._chance.randint(LEAST_WORKERS, 4)
        self._job = PooledJob(
            self.installation,
            pace_seconds=SLOW_SECONDS,
            world_size=world_size,
            backend=self.backend,
            spare_ranks=self.spares,
            **(LONG | self.fields),
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
        self._check_no_other_failure()
        return digest

    # Events

    def _kills(self) -> None:
        self._signals(self._choose_worker(), signal.SIGKILL)

    def _all_die(self) -> None:
        for worker in self._job.active():
            self._signals(worker, signal.SIGKILL)

    def _grows(self) -> None:
        self._scales(self._chance.randint(1, 3))

    def _shrinks(self) -> None:
        self._scales(-self._chance.randint(1, 3))

    def _lets_go(self) -> None:
        """The API may refuse: the worker may be the last one, or gone."""
        worker = self._choose_worker()
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
        """Stop a rank for a short time."""
        worker = self._choose_worker()
        process = identify(self._job.active().get(worker, 0))
        if self._signals(worker, signal.SIGSTOP):
            time.sleep(self._chance.uniform(0.05, 0.5))
            # By its process: it may be about to exit and must be able to.
            if process is not None and send_signal(process, signal.SIGCONT):
                self.done["SIGCONT"] += 1

    def _freezes(self) -> None:
        """Stop a rank until it is replaced."""
        worker = self._choose_worker()
        if self._signals(worker, signal.SIGSTOP):
            self._victims.add(worker)
            self.done["freeze"] += 1

    def _scales(self, difference: int) -> None:
        wanted = self.installation.see(self._job.job_id)["world_size"] + difference
        self._job.scales(min(MOST_WORKERS, max(LEAST_WORKERS, wanted)))
        self.done["grow" if difference > 0 else "shrink"] += 1

    def _choose_worker(self) -> int:
        """Wait for a worker that is neither dead nor frozen, and choose it."""
        look = lambda: sorted(set(self._job.active()) - self._victims)  # noqa: E731  clear as it is
        workers = await_value(look, lambda: self.installation.describe(self._job.job_id))
        return self._chance.choice(workers)

    def _signals(self, worker: int, number: signal.Signals) -> bool:
        try:
            self._job.signals(worker, number)
        except (KeyError, ProcessLookupError):
            return False  # it has ended meanwhile
        if number is signal.SIGKILL:
            self._victims.add(worker)
        self.done[number.name] += 1
        return True

    # Checks

    def _check_no_other_failure(self) -> None:
        """Check that only processes hit by an event failed."""
        ends = [
            event["message"]
            for event in self.installation.events(self._job.job_id)
            if event["kind"] == "rank_exited" and not event["message"].endswith(GOOD_ENDS)
        ]
        described = self.installation.describe(self._job.job_id)
        assert len(ends) <= len(self._victims), f"{ends}\n{described}"


def run(
    directory: Path,
    schedules: int = 20,
    seed: int = 0,
    *,
    backend: str = "shared_memory",
    spares: int = 1,
    epochs: int = LONG["epochs"],
    compression: str = "",
) -> Report:
    """Compare each schedule with one undisturbed rank; schedule i has the seed `seed` + i.

    A job of so many epochs outlasts the events, where steps are slow.
    """
    report, fields = Report(), dict[str, object](epochs=epochs)
    if compression:
        fields |= {"compression": compression, "program": "paced.py:Wide"}
    write_small_dataset(directory / "shards")
    with Installation(directory) as installation:
        installation.deadline_seconds = DEADLINE_SECONDS
        right = PooledJob(installation, world_size=1, **fields).completes()
        for number in range(seed, seed + schedules):
            schedule = Schedule(installation, number, backend, spares, fields)
            began_at = time.monotonic()
            try:
                digest = schedule.runs()
                assert digest == right, f"other bits: {digest} instead of {right}"
            except AssertionError as error:
                report.faults.append(f"seed {number} after {dict(schedule.done)}: {error}")
            counts = ", ".join(f"{kind} {count}" for kind, count in sorted(schedule.done.items()))
            say(f"seed {number}  {time.monotonic() - began_at:5.1f} s  {counts}")
    same = schedules - len(report.faults)
    report.lines.append(
        f"{same} of {schedules} schedules: the same bits, {right[:12]}, by {backend}"
    )
    return report


if __name__ == "__main__":
    main(run)
