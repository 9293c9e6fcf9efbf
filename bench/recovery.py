"""How fast training goes on after a ``kill -9``: ``python bench/recovery.py [KILLS]``.

Four ranks on two cores train together: 4 MB of weights, 10 ms of processor time for each of eight
virtual shards, so that a step takes 40 ms. Ranks are killed, then coordinators with a second one
waiting, then agents; a trace of all processes tells what happened when.
"""

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import timeline
from _services import Services

from muster.datasets.synthetic import synthetic
from muster.datasets.writer import write_dataset

RANKS = 4
KILLS = 25
SERVICE_KILLS = 8
SETTLE_SECONDS = 0.3
"""Of undisturbed training before each kill."""

LATER_STEPS = 3
"""In these the replacement joins, and the next spare process is prepared."""

LIMIT_SECONDS = 60.0

NOT_MEASURED = "nothing was measured, so try it again on an idle machine"


class Trace:
    """What all processes have written so far."""

    def __init__(
        self, file: Path, world_size: int = RANKS, settle_seconds: float = SETTLE_SECONDS
    ) -> None:
        self.world_size = world_size
        self.settle_seconds = settle_seconds
        self._file = file.open("ab+", buffering=0)
        self._read = 0
        self._rest = b""
        self.lines: list[timeline.Line] = []

    def stamp(self, event: str, pid: int) -> float:
        now = time.monotonic()
        line = {"event": event, "time": now, "pid": os.getpid(), "tag": "", "of": pid}
        self._file.write(json.dumps(line).encode() + b"\n")
        return now

    def update(self) -> None:
        self._file.seek(self._read)
        content = self._file.read()
        self._read += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        self.lines += map(json.loads, lines)

    def after(self, moment: float, event: str, **facts: object) -> list[timeline.Line]:
        return [
            line
            for line in self.lines
            if line["time"] > moment and line["event"] == event and facts.items() <= line.items()
        ]

    def wait(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + LIMIT_SECONDS
        self.update()
        while not condition():
            if time.monotonic() > limit:
                sys.exit(f"{NOT_MEASURED}: the job did not go on for {LIMIT_SECONDS:g} s")
            time.sleep(0.005)
            self.update()

    def wait_for(self, count: int, moment: float, event: str, **facts: object) -> float:
        """Return when the event happened for the last of so many times."""
        self.wait(lambda: len(self.after(moment, event, **facts)) >= count)
        time_of: float = self.after(moment, event, **facts)[count - 1]["time"]
        return time_of

    def ranks(self) -> dict[int, int]:
        """Return the pid that was started last for each rank."""
        return {line["rank"]: line["of"] for line in self.lines if line["event"] == "rank forked"}

    def wait_for_steps(self) -> list[int]:
        """Return the pids of the ranks once all of them train together."""
        now = time.monotonic()

        def is_complete() -> bool:
            stepped = {line["pid"] for line in self.after(now, "step")}
            return len(self.ranks()) == self.world_size and stepped == set(self.ranks().values())

        self.wait(is_complete)
        return list(self.ranks().values())


def main(kills: int) -> int:
    directory = Path(tempfile.mkdtemp(prefix="muster-trace-"))
    trace = Trace(directory / "trace")
    with Services(environ={"MUSTER_TRACE": str(directory / "trace")}) as services:
        program = services.root / "_programs.py"
        shutil.copy(Path(__file__).with_name("_programs.py"), program)
        write_dataset(
            services.root / "data",
            synthetic(samples=16_000, shards=4, features=4, classes=2, seed=0),
        )
        services.post(
            "/jobs",
            {
                "job_id": "recovery",
                "mode": "synchronous",
                "program": f"{program}:Busy",
                "world_size": RANKS,
                "batch_size": 16,
                "virtual_shards": 8,
                "epochs": 100_000,
                "checkpoint_every": 1_000_000,
            },
        )
        trace.wait_for_steps()
        if kills:
            kill_ranks(trace, kills)
        kill_coordinators(trace, services)
        kill_agents(trace)
        services.post("/jobs/recovery/stop", {})
    timeline.main(directory / "trace")
    shutil.rmtree(directory)
    return 0


def kill_ranks(trace: Trace, kills: int) -> None:
    usual, stalls, later, recovered, ready = [], [], [], [], []
    for number in range(kills):
        ranks = trace.wait_for_steps()
        time.sleep(trace.settle_seconds + 0.04 * number / kills)  # at every moment of a step
        victim = ranks[number % trace.world_size]
        killed_at = trace.stamp("killed", victim)
        os.kill(victim, signal.SIGKILL)
        survivors = set(ranks) - {victim}
        trace.wait_for_steps()
        trace.wait(
            lambda since=killed_at, pids=survivors: all(
                len(trace.after(since, "step", pid=it)) > LATER_STEPS for it in pids
            )
        )
        steps = [
            [s["time"] for s in trace.lines if s["event"] == "step" and s["pid"] == it]
            for it in survivors
        ]
        usual += [
            b - a
            for it in steps
            for a, b in pairwise(it)
            if killed_at - trace.settle_seconds < a and b < killed_at
        ]
        intervals = [
            [b - a for a, b in pairwise(it) if b > killed_at][: 1 + LATER_STEPS] for it in steps
        ]
        stalls.append(max(it[0] for it in intervals))
        later.append(max(statistics.mean(it[1:]) for it in intervals))
        recovered.append(max(min(at for at in it if at > killed_at) for it in steps) - killed_at)
        ready.append(trace.after(killed_at, "rank ready")[0]["time"] - killed_at)
    if not usual:
        sys.exit(f"{NOT_MEASURED}: no step was short enough to lie before a kill")
    step = statistics.median(usual)
    show("a usual step", usual, "")
    beyond = [it - step for it in stalls]
    show("kill -9 -> next step of the survivors, beyond a usual step", beyond, "")
    again = [it - step / trace.world_size for it in beyond]
    show("  the same, without computing the dead rank's share again", again, "<= 15 / 45")
    show("kill -9 -> next step of the last survivor", recovered, "")
    beyond = [it - step for it in later]
    show(f"the {LATER_STEPS} steps after it, each beyond a usual one", beyond, "")
    show("kill -9 -> the replacement is ready to join", ready, "<= 25 / 60")


def kill_coordinators(trace: Trace, services: Services) -> None:
    adopted = []
    for _ in range(SERVICE_KILLS):
        holder = services.coordinator
        waiting = (services.root / "services.log").read_bytes().count(b"lease_awaited")
        services.start_coordinator()
        trace.wait(
            lambda n=waiting: (
                (services.root / "services.log").read_bytes().count(b"lease_awaited") > n
            )
        )
        killed_at = trace.stamp("coordinator killed", holder.pid)
        holder.kill()
        connected = trace.wait_for(1, killed_at, "observed", observation="AgentConnected")
        adopted.append(connected - killed_at)
        holder.wait()
    show("coordinator killed -> job adopted by a waiting one", adopted, "<= 50 / 150")


def kill_agents(trace: Trace) -> None:
    adopted, stepped = [], []
    for _ in range(SERVICE_KILLS):
        trace.wait_for_steps()
        time.sleep(SETTLE_SECONDS)
        agent = [line["pid"] for line in trace.lines if line["event"] == "agent began"][-1]
        killed_at = trace.stamp("agent killed", agent)
        os.kill(agent, signal.SIGKILL)
        ready = trace.wait_for(RANKS, killed_at, "observed", observation="Ready")
        adopted.append(ready - killed_at)
        stepped.append(trace.wait_for(RANKS, killed_at, "group joined") - killed_at)
    show("agent killed -> all ranks adopted", adopted, "<= 100 / 300")
    show("agent killed -> ranks are in a group of the next agent", stepped, "")


def show(what: str, values: Sequence[float], goal: str) -> None:
    middle, high = 1e3 * timeline.p50(values), 1e3 * timeline.p95(values)
    print(f"{what:<62} {middle:7.1f} / {high:6.1f} ms  {goal}", flush=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else KILLS))
