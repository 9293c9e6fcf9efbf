"""Ranks start processes that try to escape; all of them must end, and no other process.

Run ``python -m stress.containment [TRIALS] [SEED]`` for more trials. A trial is a rank of a real
agent that starts some `runaways`, and the rank's end: by itself, by SIGKILL, or after its agent was
killed, by a coordinator's sweep or by another agent. Lookalikes of the job's processes must
survive.
"""

import asyncio
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cli.output import table
from coordinator.launchers.local import LocalLauncher
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.environ import process_tag
from muster.host.containment import cgroups_of_job, kill_attempt
from muster.host.limits import ShellLimits
from muster.host.processes import identify, is_running, send_signal
from stress.containment import runaways
from stress.containment.lone_agent import LoneAgent
from stress.containment.lookalikes import neighbours, relatives
from stress.runner import Report, chance, main, say
from tests.support.installation import await_value

DEADLINE_SECONDS = 2.0

ENDS = ("by itself", "by SIGKILL", "by a sweep", "by a successor")
"""Before the last two its agent is killed."""

PROGRESS_TRIALS = 25
"""So many take about ten seconds."""

HEADER = ("started", "ended", "trials", "victims", "left", "decoys", "harmed", "p50 ms", "max ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one trial."""

    victims: int
    seconds: float
    """From the end of the rank, or the order to end it, until nothing of it ran."""
    when_reported: int
    """How many ran when the exit was reported."""
    left: int
    cells: int
    decoys: int
    harmed: int


Outcomes = Mapping[tuple[str, str], Sequence[Outcome]]
"""By what the rank started, and how it ended."""


class Trial:
    """One rank, what it started, and its end."""

    def __init__(self, agent: LoneAgent, number: int) -> None:
        self._agent = agent
        self._number = number
        self._place = agent.root / f"trial-{number}"
        self._place.mkdir()

    def act(self, kind: str, end: str, *, is_outside: bool) -> Outcome:
        script = [sys.executable, str(Path(runaways.__file__)), kind, str(self._place)]
        outside = ["--outside"] if is_outside else []
        pid = self._agent.start(0, self._number, *script, *outside)
        await_value((self._place / "ready").exists, lambda: f"{kind}: {self._place}")
        rank = identify(pid)
        assert rank is not None
        runs = watch(rank, self._place)
        victims = runs()
        with (
            neighbours(self._agent.uid) as strangers,
            relatives(self._agent.uid, 0, self._number) as others,
        ):
            # A sweep is for the whole job, whose ranks the others may be.
            decoys = strangers if end == "by a sweep" else [*strangers, *others]
            began = time.monotonic()
            self._end(rank, end)
            when_reported = runs()
            while runs() and time.monotonic() < began + DEADLINE_SECONDS:
                time.sleep(0.001)
            seconds = time.monotonic() - began
            # Once more, for processes whose pids have been reused.
            sweep(self._agent, [replace(rank, pid=decoy.pid) for decoy in decoys], end)
            harmed = sum(not is_running(decoy) for decoy in decoys)
        return Outcome(
            victims=victims,
            seconds=seconds,
            when_reported=when_reported,
            left=runs(),
            cells=sum(
                cell.name.endswith(f"-{self._number}") for cell in cgroups_of_job(self._agent.uid)
            ),
            decoys=len(decoys),
            harmed=harmed,
        )

    def _end(self, rank: ProcessRecord, end: str) -> None:
        match end:
            case "by itself":
                (self._place / "go").touch()
                self._agent.await_exit()
            case "by SIGKILL":
                send_signal(rank, signal.SIGKILL)
                self._agent.await_exit()
            case "by a sweep":
                self._agent.kill()
                sweep(self._agent, [], end)
            case _:
                self._agent.kill()
                send_signal(rank, signal.SIGKILL)
                name = process_tag(self._agent.uid, 0, self._number)
                await_value(lambda: kill_attempt(name), lambda: f"{name} survives SIGKILL")


def sweep(agent: LoneAgent, known: list[ProcessRecord], end: str = "by a sweep") -> None:
    """Do what a coordinator does once an agent has ended."""
    if end == "by a sweep":
        asyncio.run(LocalLauncher({}, ShellLimits(1024, 1024)).sweep(agent.uid, known))


def watch(rank: ProcessRecord, place: Path) -> Callable[[], int]:
    """Return a function that counts the running processes of a rank."""
    told = [int(line) for line in (place / "pids").read_text().split()]
    records = [rank, *(record for pid in told if (record := identify(pid)) is not None)]

    def count() -> int:
        running = {record.pid for record in records if is_running(record)}
        return len(running.union(named(str(place))))

    return count


def named(word: str) -> Iterator[int]:
    """Yield processes with `word` among their arguments: a comet changes its pid all the time."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                arguments = Path(entry.path, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if word.encode() in arguments:
                yield int(entry.name)


def run(directory: Path, trials: int = 500, seed: int = 0) -> Report:
    """Run `trials` in an order chosen by `seed`, every kind and end equally often."""
    plan = [
        (kind, end, is_outside)
        for kind in runaways.KINDS
        for end in ENDS
        for is_outside in (False, True)
        if not (kind == "comet" and is_outside)  # only the cgroup catches a comet
    ]
    plan *= trials // len(plan) + 1
    chance(seed).shuffle(plan)
    outcomes = defaultdict(list)
    agents: list[LoneAgent] = []
    try:
        for number, (kind, end, is_outside) in enumerate(plan[:trials]):
            if not agents or not agents[-1].is_running:
                agents.append(LoneAgent(directory))
            outcome = Trial(agents[-1], number).act(kind, end, is_outside=is_outside)
            outcomes[f"{kind}, outside" if is_outside else kind, end].append(outcome)
            if (number + 1) % PROGRESS_TRIALS == 0:
                say(f"{number + 1} of {trials} ranks have ended")
    finally:
        for agent in agents:
            agent.kill()
            sweep(agent, [])
    return Report(list(table(HEADER, _rows(outcomes))), list(_faults(outcomes)))


def _faults(outcomes: Outcomes) -> Iterator[str]:
    every = [outcome for several in outcomes.values() for outcome in several]
    # A comet may be between two processes at that moment.
    still = [it for (kind, _), several in outcomes.items() if kind != "comet" for it in several]
    counts = {
        "trials without anything to contain": sum(it.victims < 2 for it in still),
        "processes left after 2 s": sum(one.left for one in every),
        "processes running when the exit was reported": sum(one.when_reported for one in every),
        "control groups left": sum(one.cells for one in every),
        "decoys harmed": sum(one.harmed for one in every),
    }
    yield from (f"{count} {what}" for what, count in counts.items() if count)
    if not sum(one.decoys for one in every):
        yield "no decoy was there"


def _rows(outcomes: Outcomes) -> Iterator[Sequence[str | int]]:
    for (kind, end), several in sorted(outcomes.items()):
        took = [round(1000 * one.seconds) for one in several]
        sums = [
            sum(getattr(one, name) for one in several)
            for name in ("victims", "left", "decoys", "harmed")
        ]
        yield kind, end, len(several), *sums, round(statistics.median(took)), max(took)


if __name__ == "__main__":
    main(run)
