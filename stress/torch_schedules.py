"""The examples with `muster.torch` in random schedules: ranks die and join; the bits are the same.

``python -m stress.torch_schedules [mlp|resnet|gpt] [SCHEDULES] [SEED] [--kills 10]`` runs one of
the examples in a new installation: alone and with 2, 3, 4 and 8 ranks; with another seed, which
must end with other bits; and in random schedules. Schedule i has the seed SEED + i.
"""

import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from muster.host.containment import tagged_processes
from muster.host.processes import send_signal
from stress.runner import Report, chance, main, say
from tests.support.installation import Installation
from tests.support.pools import PooledJob

EXAMPLES = Path(__file__).parents[1] / "examples"
WORLD_SIZES = (1, 2, 3, 4, 8)
MOST_WORKERS = 4
KILLS = 10
SCALINGS = 3
SERVICES = ("none", "coordinator", "agent", "both")
"""Which of them a schedule kills, too."""

DEADLINE_SECONDS = 300.0
"""For each wait: eight starts with torch at once take a busy machine a minute."""

LAST_MOMENT = 0.85
"""The share of the steps in which something happens."""


@dataclass(frozen=True)
class Model:
    """An example, and how slowly it trains while ranks are killed."""

    script: str
    pause_seconds: float
    """After each virtual shard."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Of its jobs."""


MODELS = {
    "mlp": Model("torch_elastic.py", 0.03),
    "resnet": Model("torch_resnet.py", 0.1),
    "gpt": Model("torch_gpt.py", 0.1),
}


@dataclass(frozen=True)
class End:
    """What must be equal after every history."""

    checkpoint: str
    """Digest of model, optimizer, scheduler and position in the data."""
    printed: frozenset[str]
    """Digests of the model that ranks have printed."""

    def __str__(self) -> str:
        return (
            f"{self.checkpoint[:12]}, printed {', '.join(it[:12] for it in sorted(self.printed))}"
        )


def printed_digests(job: PooledJob) -> frozenset[str]:
    """Return the digests of the model that ranks of a job have printed."""
    return frozenset(re.findall(r"sha256 ([0-9a-f]{64})", ranks_output(job)))


def ranks_output(job: PooledJob) -> str:
    """Return what all ranks of a job have printed."""
    logs = job.installation.files.job(job.job_id).logs.glob("rank_*.log")
    return "".join(it.read_text() for it in logs)


class TorchJob(PooledJob):
    """A job that trains one of the examples."""

    def __init__(
        self, installation: Installation, model: Model, pause: float = 0.0, **fields: object
    ) -> None:
        installation.deadline_seconds = DEADLINE_SECONDS
        super().__init__(
            installation,
            program=None,
            command=[sys.executable, "-W", "ignore", str(EXAMPLES / model.script)],
            env={"PAUSE_SECONDS": str(pause)},
            **{
                "virtual_shards": 8,
                "epochs": 1,
                **model.fields,
                **fields,
            },  # one epoch: as many as the script says
        )

    def end(self) -> End:
        """Wait until it completes; every sample must have counted exactly once."""
        return End(self.completes(), printed_digests(self))


@dataclass
class Schedule:
    """One job, and what happens to it at random moments."""

    installation: Installation
    model: Model
    seed: int
    kills: int = KILLS
    scalings: int = SCALINGS
    done: Counter[str] = field(default_factory=Counter)

    def run(self) -> End:
        draw = chance((self.model.script, self.seed))
        world_size = draw.randint(2, MOST_WORKERS)
        self._job = TorchJob(
            self.installation,
            self.model,
            self.model.pause_seconds,
            world_size=world_size,
            max_workers=MOST_WORKERS,
        )
        total_steps = self._job.wait_until(lambda: self._job.see()["total_steps"])
        events = [self._kill] * self.kills + [self._scale] * self.scalings
        services = SERVICES[self.seed % len(SERVICES)]
        events += [self._kill_coordinator] * (services in ("coordinator", "both"))
        events += [self._kill_agent] * (services in ("agent", "both"))
        draw.shuffle(events)
        last = int(LAST_MOMENT * total_steps)
        for event, step in zip(
            events, sorted(draw.choices(range(last), k=len(events))), strict=True
        ):
            self._job.wait_until(lambda step=step: self._job.see()["step"] >= step)
            time.sleep(draw.uniform(0, 8 * self.model.pause_seconds / world_size))
            assert not self._job.is_over(), "the job is over too early: give it more to do"
            event(draw)
        end = self._job.end()
        self.done["restarts"] = self._job.see()["restarts"]
        return end

    def _kill(self, draw: random.Random) -> None:
        """Kill a rank that trains, maybe the last one."""
        while True:
            worker = draw.choice(sorted(self._job.wait_until(self._job.active)))
            with suppress(KeyError, ProcessLookupError):  # it has ended meanwhile
                self._job.signals(worker)
                self.done["kills"] += 1
                return

    def _scale(self, draw: random.Random) -> None:
        self._job.scales(draw.randint(1, MOST_WORKERS))
        self.done["scalings"] += 1

    def _kill_coordinator(self, _: random.Random) -> None:
        self.installation.restart_coordinator()
        self.done["coordinators"] += 1

    def _kill_agent(self, _: random.Random) -> None:
        uid = self.installation.uids[self._job.job_id]
        for agent in tagged_processes(f"{uid}/agent"):
            self.done["agents"] += send_signal(agent, signal.SIGKILL)


def run(
    directory: Path, model: str = "mlp", schedules: int = 20, seed: int = 0, *, kills: int = KILLS
) -> Report:
    """Compare worlds and schedules with one undisturbed rank; schedule i has seed `seed` + i."""
    report, trained = Report(), MODELS[model]
    with Installation(directory) as installation:
        right = TorchJob(installation, trained, world_size=1).end()
        say(f"{model}  1 rank: {right}")
        for world_size in WORLD_SIZES[1:]:
            end = TorchJob(installation, trained, world_size=world_size).end()
            say(f"{model}  {world_size} ranks: {end}")
            if end != right:
                report.faults.append(f"other bits with {world_size} ranks: {end}, not {right}")
        other = TorchJob(installation, trained, world_size=1, seed=1).end()
        say(f"{model}  1 rank, another seed: {other}")
        if other.checkpoint == right.checkpoint or other.printed == right.printed:
            report.faults.append("another seed ends with the same bits: nothing was compared")
        same = 0
        for number in range(seed, seed + schedules):
            schedule, began_at = Schedule(installation, trained, number, kills), time.monotonic()
            found = ""
            try:
                end = schedule.run()
                found = str(end)
                assert end == right, f"other bits: {end}, not {right}"
                same += 1
            except AssertionError as error:
                report.faults.append(f"seed {number} after {dict(schedule.done)}: {error}")
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(schedule.done.items()))
            say(f"{model}  seed {number}  {time.monotonic() - began_at:5.1f} s  {counts}  {found}")
    report.lines.append(f"{model}: {same} of {schedules} schedules: the same bits, exactly once")
    return report


if __name__ == "__main__":
    main(run)
