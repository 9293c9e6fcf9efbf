"""Jobs over three hosts, which lose ranks, power, links and the coordinator: no bit changes.

``python -m stress.hosts [SCHEDULES] [SEED] [--faults 5]`` needs root, namespaces and sshd. The
ranks of one job are on three hosts that are network, process and mount namespaces with a disk and a
boot of their own. Each schedule strikes one job several times at random moments, and its result is
compared with that of one rank on one host that nothing has disturbed. Of the ranks on a host that
was given up, none may run 10 s after the host is back.

``--compression int8`` compresses the sums. ``--only 'coordinator killed'`` or another fault leaves
out the others; `--cut` is how many seconds the longest cut takes.
"""

import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final

from muster.checkpoints.comparison import digests
from muster.checkpoints.listing import checkpoint_dirs
from muster.contracts.job.status import JobId
from muster.contracts.settings.paths import checkpoints_of_job
from stress.frozen_hosts import command_of
from stress.runner import Report, chance, main, say
from tests.support import noise
from tests.support.clusters import ClusterInstallation, cluster
from tests.support.hosts import Host
from tests.support.installation import await_value, is_over

RANKS: Final = 6
FIELDS: Final[dict[str, Any]] = {"mode": "synchronous", "batch_size": 32, "virtual_shards": 8}
PACE_SECONDS: Final = 0.02
NEW_STEPS: Final = 150  # what is shown of a job is a second or two old
ANSWERS: Final = {
    "rank killed": "step_taken",
    "host without power": "step_taken",
    "host cut off": "step_taken",
    "coordinator killed": "agent_adopted",
    "scaled": "step_taken",
}
STALE: Final = "cut healed"
"""The event by which a job has got over a fault: the first step of a new group, for example."""
LEAST_CUT_SECONDS: Final = 5.0
STALE_SECONDS: Final = 10.0  # an attempt to connect that hangs costs five
DEADLINE_SECONDS: Final = 600.0  # a job that was disturbed little takes two minutes


class Schedule:
    """One job and what is done to it."""

    def __init__(
        self, installation: ClusterInstallation, job_id: str, draw: random.Random, most_cut: float
    ) -> None:
        self.job_id = job_id
        self.seconds: dict[str, list[float]] = {}
        """By fault: until its event in `ANSWERS`; and how long ranks outlast the end of a cut."""
        self._installation = installation
        self._draw = draw
        self._most_cut = most_cut

    def strike(self, fault: str) -> None:
        """Do it once all ranks train, and wait until the job has gone on."""
        running = self._installation.wait_until(
            self.job_id, lambda seen: is_over(seen) or seen["status"] == "RUNNING"
        )
        if is_over(running):
            return
        began = datetime.now(UTC)
        undo = (FAULTS | OTHERS)[fault](self)
        self._await_steps()
        for seconds in self._seconds_until(ANSWERS.get(fault), began):
            self.seconds.setdefault(fault, []).append(seconds)
        say(f"{self.job_id}: {fault} {self.seconds.get(fault, [])[-1:]}")
        if undo is not None:
            undo()

    def kill_rank(self) -> None:
        host = self._draw.choice(self._installation.machines)
        tags = self._installation.process_tags(host).items()
        ranks = [pid for pid, tag in tags if tag.partition("/")[0] in map(str, range(RANKS))]
        if ranks:
            os.kill(self._draw.choice(ranks), signal.SIGKILL)

    def kill_agent(self) -> None:
        host = self._draw.choice(self._installation.machines)
        tags = self._installation.process_tags(host).items()
        for pid in [pid for pid, tag in tags if is_agent(pid, tag)]:
            os.kill(pid, signal.SIGKILL)

    def power_off(self) -> Callable[[], None]:
        host = self._other_host()
        host.power_off()

        def power_on() -> None:
            host.power_on()
            self._installation.boot(host)

        return power_on

    def cut(self) -> None:
        host, one_way = self._other_host(), self._draw.random() < 0.5
        others = [it for it in self._installation.machines if it is not host]
        began, before = datetime.now(UTC), set(self._installation.process_tags(host))
        host.cut(*others, one_way=one_way)
        time.sleep(self._draw.uniform(LEAST_CUT_SECONDS, self._most_cut))
        host.heal()
        if any(self._seconds_until("host_lost", began)):
            healed = time.monotonic()
            await_value(
                lambda: not before & set(self._installation.process_tags(host)),
                lambda: (
                    f"ranks of {host.name}, which was given up: "
                    f"{self._installation.process_tags(host)}"
                ),
            )
            self.seconds.setdefault(STALE, []).append(time.monotonic() - healed)

    def kill_coordinator(self) -> None:
        self._installation.restart_coordinator()

    def scale(self) -> None:
        size = self._draw.randint(2, RANKS)
        self._installation.request("PATCH", f"/jobs/{self.job_id}", json={"world_size": size})

    def _seconds_until(self, kind: str | None, began: datetime) -> Iterator[float]:
        """Yield after how long the first event of a kind came, if it came."""
        events = self._installation.events(self.job_id)
        times = (datetime.fromisoformat(it["at"]) for it in events if it["kind"] == kind)
        yield from islice(((at - began).total_seconds() for at in times if at > began), 1)

    def _other_host(self) -> Host:
        return self._draw.choice(self._installation.machines[1:])

    def _step(self) -> int:
        return int(self._installation.see(self.job_id)["step"])

    def _await_steps(self) -> None:
        before = self._step()
        self._installation.wait_until(
            self.job_id, lambda seen: is_over(seen) or seen["step"] >= before + NEW_STEPS
        )


FAULTS: Final[dict[str, Callable[[Schedule], Callable[[], None] | None]]] = {
    "rank killed": Schedule.kill_rank,
    "host without power": Schedule.power_off,
    "host cut off": Schedule.cut,
    "coordinator killed": Schedule.kill_coordinator,
    "scaled": Schedule.scale,
}


OTHERS: Final[dict[str, Callable[[Schedule], Callable[[], None] | None]]] = {
    "agent killed": Schedule.kill_agent,
}
"""Those that are struck only where they are asked for."""


def is_agent(pid: int, tag: str) -> bool:
    """Return whether this process of a job is the agent, and not what it keeps ready."""
    return not tag.partition("/")[0].isdigit() and "worker.agent" in command_of(pid)


def run(  # noqa: PLR0913  the options
    directory: Path,
    schedules: int = 10,
    seed: int = 0,
    *,
    faults: int = 5,
    epochs: int = 200,
    only: str = "",
    cut: float = 20.0,
    compression: str = "",
) -> Report:
    """Run so many jobs, each with so many faults; a job of so many epochs outlasts them."""
    kinds = [only] if only else list(FAULTS)
    report, seconds = Report(), dict[str, list[float]]()
    with cluster(directory) as installation:
        installation.deadline_seconds = DEADLINE_SECONDS
        fields = FIELDS | {"epochs": epochs}
        if compression:  # of more elements than are sent whole
            program = f"{noise.__file__}:Noise"
            fields |= {"compression": compression, "program": program}
        calm = installation.submit(world_size=1, **fields)
        installation.complete(calm)
        wanted = result(installation, calm)
        for number in range(schedules):
            draw = chance((seed, number))
            size = {"world_size": RANKS, "max_workers": RANKS, "min_workers": 1}
            job_id = installation.submit(sleep_sec=PACE_SECONDS, **size, **fields)
            installation.wait_until(job_id, lambda seen: seen["step"] >= NEW_STEPS)
            schedule = Schedule(installation, job_id, draw, cut)
            for fault in [draw.choice(kinds) for _ in range(faults)]:
                time.sleep(draw.random())
                schedule.strike(fault)
            report.faults += _problems(installation, job_id, wanted)
            if kinds == ["coordinator killed"]:
                attempts = installation.request("GET", f"/jobs/{job_id}/attempts").json()[
                    "attempts"
                ]
                report.faults += [f"{job_id}: {len(attempts)} attempts"] * (len(attempts) != RANKS)
            for fault, taken in schedule.seconds.items():
                seconds.setdefault(fault, []).extend(taken)
    report.faults += [
        f"ranks of a host that was given up ran for {it:.1f} s after it was back"
        for it in seconds.get(STALE, [])
        if it > STALE_SECONDS
    ]
    report.lines += [
        f"{fault}: {len(taken)} times, {ANSWERS.get(fault, 'no old rank runs')} after "
        f"{statistics.median(taken):.2f} s (median), {_p95(taken):.2f} s (p95), {max(taken):.2f} s"
        for fault, taken in seconds.items()
    ]
    return report


def _p95(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1]


def _problems(installation: ClusterInstallation, job_id: str, wanted: object) -> Iterator[str]:
    """Complete a job, and yield what must not be."""
    installation.complete(job_id)
    if result(installation, job_id) != wanted:
        yield f"{job_id}: other bits than one rank that was not disturbed"
    audit = installation.request("GET", f"/jobs/{job_id}/audit").json()
    if not (audit["complete"] and audit["exactly_once"]):
        yield f"{job_id}: {audit}"
    await_value(
        lambda: not any(installation.process_tags(host) for host in installation.machines),
        lambda: f"left behind: {[installation.process_tags(it) for it in installation.machines]}",
    )


def result(installation: ClusterInstallation, job_id: str) -> object:
    place = checkpoints_of_job(installation.checkpoint_dir, JobId(job_id))
    return list(digests(checkpoint_dirs(place)))


if __name__ == "__main__":
    main(run)
