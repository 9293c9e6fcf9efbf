"""Trainings on a machine that does not let them run, with exit handlers that take long.

``python -m stress.starved [--trainings 20] [--load 60] [--minutes 10] [--timeout 10] [--seed 0]``
runs in a new installation. Beside so many busy processes it trains jobs of every kind, whose ranks
register an exit handler of up to six heartbeat timeouts before they join. Each has to complete
within so many minutes, with the bits of a calm run and without losing a process. As many scripts
end with `sys.exit(3)` behind such a handler, each of which is a failure. Meanwhile a rank is
stopped, one is frozen and one deadlocks: each has to be killed within twice the timeout, which
``--timeout`` sets.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from muster.checkpoints.comparison import digests
from muster.checkpoints.errors import CheckpointMissing
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.settings.paths import checkpoints_of_job
from stress.runner import Report, chance, main, say
from stress.starved.load import WaitShares, can_freeze, freeze, starving
from tests.support.installation import Installation, Seen, is_over, pids, write_small_dataset

RANKS = Path(__file__).with_name("ranks.py")
LONGEST_EXIT = 6
"""In heartbeat timeouts."""

LEAST_WAIT_SHARE = 0.9
LOOK_SECONDS = 1.0


def script(kind: str) -> list[str]:
    return [sys.executable, "-W", "ignore", str(RANKS), kind]


KINDS: Mapping[str, Mapping[str, Any]] = {
    "script": {"world_size": 2, "command": script("script")},
    "together": {
        "mode": "synchronous",
        "world_size": 2,
        "program": f"{RANKS}:Regression",
        "virtual_shards": 8,
    },
    "wrapper": {"command": ["bash", "-c", 'cd . && "$@"; exit $?', "-", *script("script")]},
    "command": {"world_size": 2, "command": script("command")},
    "built-in": {"world_size": 2},  # no program of a user, so no exit handler
    "torch": {
        "mode": "synchronous",
        "world_size": 2,
        "epochs": 2,
        "command": script("torch"),
        "env": {"PAUSE_SECONDS": "0"},
    },
    "gang": {"world_size": 2, "restart_scope": "gang", "command": script("gang")},
}
NEEDS_TORCH = frozenset({"torch", "gang"})
FAILING, STRUCK = "failing", "struck"

STRIKES: Mapping[str, Callable[[int], None]] = {
    "stopped": lambda pid: os.kill(pid, signal.SIGSTOP),
    "frozen": freeze,
}

UNDESERVED = frozenset({"rank_killed", "agent_lost", "agent_killed"})
"""Events that nothing in a job has caused but the load."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A job beside the load."""

    job_id: str
    kind: str
    began_at: float
    blow: str = ""
    """What is done to its rank; "" if nothing."""
    strike_after: float = 0.0
    """Seconds from its first step."""
    stepped_at: float | None = None
    struck_at: float | None = None
    is_judged: bool = False


class Trial:
    """Jobs beside the load, and what must not be of them."""

    def __init__(
        self,
        installation: Installation,
        directory: Path,
        calm: Mapping[str, object],
        timeout_seconds: float,
    ) -> None:
        """`calm` has the results of an undisturbed run by kind; `directory` is where ranks work."""
        self.faults: list[str] = []
        self.jobs: list[Job] = []
        self._installation = installation
        self._directory = directory
        self._calm = calm
        self._timeout_seconds = timeout_seconds

    def submit(self, kind: str, exit_seconds: int, **job: Any) -> None:
        name = f"{len(self.jobs):02}-{kind}-{exit_seconds}"
        fields = {"heartbeat_timeout": self._timeout_seconds, **fields_of(kind, self._directory)}
        self.jobs.append(
            Job(
                job_id=self._installation.submit(job_id=name, **fields),
                kind=kind,
                began_at=time.monotonic(),
                **job,
            )
        )

    def follow(self, deadline: float) -> None:
        """Strike ranks as they train, and judge each job at its end, or at the deadline."""
        while left := [job for job in self.jobs if not job.is_judged]:
            time.sleep(LOOK_SECONDS)
            is_late = time.monotonic() > deadline
            seen = {it["job_id"]: it for it in self._installation.see_all()}
            for job in left:
                if job.blow and job.struck_at is None:
                    self._strike(job, seen[job.job_id])
                if is_over(seen[job.job_id]) or is_late:
                    self._judge(job)

    def living(self) -> Iterator[int]:
        """Yield the pids of ranks to which nothing was done."""
        ids = {job.job_id for job in self.jobs if not job.blow}
        for seen in self._installation.see_all():
            if seen["job_id"] in ids:
                yield from filter(None, pids(seen))

    def _strike(self, job: Job, seen: Seen) -> None:
        now, worker, place = time.monotonic(), seen["workers"][0], self._directory / job.job_id
        if not worker["step"] or not worker["pid"]:
            return
        job.stepped_at = job.stepped_at or now
        if now < job.stepped_at + job.strike_after:
            return
        with suppress(OSError):  # the process has just been replaced, or has not deadlocked yet
            if job.blow == "deadlocked":
                place.with_suffix(".deadlock").touch()
                job.struck_at = place.with_suffix(".deadlocked").stat().st_mtime
            else:
                STRIKES[job.blow](worker["pid"])
                job.struck_at = time.time()
            place.with_suffix(".end").touch()  # for its successor

    def _judge(self, job: Job) -> None:
        job.is_judged = True
        found = self._installation.job(job.job_id)
        events = self._installation.events(job.job_id)
        faults = list(self._faults_of(job, found, events))
        seconds = time.monotonic() - job.began_at
        say(f"{job.job_id} is {found['status']} after {seconds:.0f} s: {'; '.join(faults) or 'ok'}")
        self.faults += [f"{job.job_id}: {fault}" for fault in faults]

    def _faults_of(self, job: Job, found: Seen, events: Sequence[Seen]) -> Iterator[str]:
        wanted = "FAILED" if job.kind == FAILING else "COMPLETED"
        if found["status"] != wanted:
            why = found["message"] or "the time was over"
            yield f"{found['status']} instead of {wanted}: {why}"
        elif job.kind == FAILING and "code 3" not in found["message"]:
            yield f"failed for another reason: {found['message']}"
        elif job.kind in KINDS and result(self._installation, job.job_id) != self._calm[job.kind]:
            yield "other bits than in a calm run"
        lost = [it for it in events if it["kind"] in UNDESERVED]
        if job.blow:
            yield from self._faults_of_kill(job, lost)
        if lost:
            times = f", and {len(lost) - 1} more" if lost[1:] else ""
            yield f"{lost[0]['message']}{times}"

    def _faults_of_kill(self, job: Job, lost: list[Seen]) -> Iterator[str]:
        """Take the kill that the job deserves from its losses, and say what is wrong with it."""
        if job.struck_at is None:
            yield f"was not {job.blow}"
            return
        for event in lost:
            took = datetime.fromisoformat(event["at"]).timestamp() - job.struck_at
            if event["kind"] == "rank_killed" and took > 0:
                lost.remove(event)
                if took > 2 * self._timeout_seconds:
                    yield f"{job.blow}, and killed after {took:.1f} s: the goal is missed"
                return
        yield f"{job.blow}, and not killed"


def run(
    directory: Path,
    *,
    trainings: int = 20,
    load: int = 60,
    minutes: float = 10.0,
    timeout: float = 10.0,
    seed: int = 0,
) -> Report:
    """Run all of it in a new installation."""
    draw = chance(seed)
    has_torch = find_spec("torch") is not None
    kinds = [kind for kind in KINDS if has_torch or kind not in NEEDS_TORCH][:trainings]
    data, place = write_small_dataset(directory / "shards"), directory / "work"
    place.mkdir()
    blows = ["stopped", "deadlocked", *(["frozen"] if can_freeze() else [])]
    with Installation(directory, DATASET_DIR=str(data), MUSTER_SLOTS="1000") as installation:
        calm = calm_results(installation, kinds, place)
        services = installation.api.pid, installation.coordinator.pid
        trial = Trial(installation, place, calm, timeout)
        say(f"{load} busy processes")
        with starving(load, services):
            shares, longest = WaitShares(trial.living), round(LONGEST_EXIT * timeout)
            for number in range(trainings):
                trial.submit(kinds[number % len(kinds)], draw.randint(0, longest))
                trial.submit(FAILING, draw.randint(0, longest))
            for blow in blows:
                trial.submit(STRUCK, 0, blow=blow, strike_after=timeout * draw.random())
            trial.follow(time.monotonic() + 60 * minutes)
            share = shares.end()
    report = Report(faults=trial.faults)
    report.lines.append(
        f"{trainings} trainings, {trainings} failures and {', '.join(blows)} ranks beside {load} "
        f"busy processes: a rank that wants to run waits for {share:.0%} of its time"
    )
    if share < LEAST_WAIT_SHARE:
        report.faults.append(f"ranks waited for {share:.0%} of their time: the goal is missed")
    return report


def fields_of(kind: str, working_dir: Path) -> dict[str, Any]:
    common = {"world_size": 1, "working_dir": str(working_dir)}
    command = {"command": script(kind), "max_restarts": 0 if kind == FAILING else 50}
    return {**common, **KINDS.get(kind, command)}


def calm_results(
    installation: Installation, kinds: Sequence[str], working_dir: Path
) -> dict[str, object]:
    """Run a job of each kind without load and slow exits."""
    jobs = {
        kind: installation.submit(job_id=f"calm-{kind}-0", **fields_of(kind, working_dir))
        for kind in kinds
    }
    for job_id in jobs.values():
        installation.complete(job_id)
    return {kind: result(installation, job_id) for kind, job_id in jobs.items()}


def result(installation: Installation, job_id: str) -> object:
    """Return the identity of the newest checkpoints, and the digests that ranks have printed."""
    saved: list[object] = []
    with suppress(CheckpointMissing):  # a command saves where it wants
        place = checkpoints_of_job(installation.checkpoint_dir, job_id)
        saved += digests(checkpoint_dirs(place))
    logs = installation.files.job(job_id).logs.glob("rank_*.log")
    printed = re.findall(r"(?:sha256|of sum) (\S+)", "".join(log.read_text() for log in logs))
    return saved, sorted(printed)


if __name__ == "__main__":
    main(run)
