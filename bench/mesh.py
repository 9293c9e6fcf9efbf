"""How soon machines of a household find each other, meet, and notice who is gone.

    python -m bench.mesh [ROUNDS] [SEED]

Three hosts of the tests, a script on each. Times are from the start of the processes, from the
fault to the last `PeerGone`, and from that until the last member of the new group has restored.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from tests.support.homes import HomeScript, ask_all, household
from tests.support.hosts import Host, hosts, refusal

HOSTS: Final = 3
IDLE_SECONDS: Final = 20.0
STATE_BYTES: Final = 4 << 20
WORK_SECONDS: Final = 1.0
"""At most, before a fault."""

GOALS: Final[Mapping[str, tuple[str, float]]] = {
    "all see all": ("s", 3.0),
    "group ready": ("s", 6.0),
    "killed: PeerGone": ("s", 0.2),
    "cut: PeerGone": ("s", 6.0),
    "frozen: PeerGone": ("s", 6.0),
    "met anew, restored": ("s", 3.0),
    "waiting: of a core": ("%", 0.5),
    "waiting: memory": ("MB", 60.0),
    "waiting: sent": ("B/s", 1000.0),
}


class Figures:
    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {name: [] for name in GOALS}

    def add(self, name: str, value: float) -> None:
        self._taken[name].append(value)

    def lines(self) -> Iterator[str]:
        yield f"{'':24}{'median':>10}{'p95':>10}{'goal':>12}"
        for name, values in self._taken.items():
            unit, goal = GOALS[name]
            ranked = sorted(values)
            median, late = ranked[len(ranked) // 2], ranked[int(0.95 * (len(ranked) - 1) + 0.5)]
            verdict = "" if late <= goal else "  MISSED"
            yield f"{name:24}{median:>10.2f}{late:>10.2f}{f'≤ {goal:g} {unit}':>12}{verdict}"


@contextmanager
def started(made: list[Host], directory: Path) -> Iterator[list[HomeScript]]:
    with household(directory) as home:
        yield [home.start(host) for host in made]


def first_answers(scripts: list[HomeScript], verb: str, **options: Any) -> list[dict[str, Any]]:
    """Ask before they run, and return what they answer then."""
    for script in scripts:
        script.ask(verb, **options)
    for script in scripts:
        script.answer()
    return [script.answer() for script in scripts]


def last(answers: list[dict[str, Any]], key: str = "at") -> float:
    return max(float(said[key]) for said in answers)


def see(figures: Figures, made: list[Host], directory: Path) -> None:
    began = time.monotonic()
    with started(made, directory) as scripts:
        answers = first_answers(scripts, "see", others=HOSTS - 1)
        figures.add("all see all", last(answers, "seen_at") - began)


def lose(
    figures: Figures, made: list[Host], directory: Path, name: str, work_seconds: float
) -> None:
    """Have three meet and save, lose the last, meet anew and restore."""
    began = time.monotonic()
    with started(made, directory) as scripts:
        met = first_answers(scripts, "discover", peers=HOSTS - 1, preset="fast")
        figures.add("group ready", last(met) - began)
        *survivors, victim = scripts
        faults: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "killed": (victim.kill, lambda: None),
            "cut": (lambda: made[-1].cut(*made[:-1]), made[-1].heal),
            "frozen": (made[-1].freeze, made[-1].thaw),
        }
        begin, end = faults[name]
        ask_all(scripts, "save", size=STATE_BYTES // 4)
        for script in survivors:
            script.ask("reduce")
        time.sleep(work_seconds)
        at = time.monotonic()
        begin()
        gone = [script.answer() for script in survivors]
        assert {said.get("error") for said in gone} == {"PeerGone"}, gone
        figures.add(f"{name}: PeerGone", last(gone) - at)
        anew = ask_all(survivors, "meet")
        assert {len(said.get("members", [])) for said in anew} == {HOSTS - 1}, anew
        restored = ask_all(survivors, "restore")
        assert {said.get("size") for said in restored} == {STATE_BYTES // 4}, restored
        figures.add("met anew, restored", last(restored) - last(gone))
        end()


def wait(figures: Figures, made: list[Host], directory: Path) -> None:
    """Two that wait for a third."""
    with started(made[:-1], directory) as scripts:
        for script in scripts:
            script.ask("discover", peers=HOSTS - 1, timeout_seconds=100 * IDLE_SECONDS)
            script.answer()
        time.sleep(IDLE_SECONDS / 2)  # they have found each other
        process = psutil.Process(scripts[0].pid)
        before, sent = sum(process.cpu_times()[:2]), _sent_bytes(process.pid)
        time.sleep(IDLE_SECONDS)
        used = sum(process.cpu_times()[:2]) - before
        figures.add("waiting: of a core", 100 * used / IDLE_SECONDS)
        figures.add("waiting: memory", process.memory_info().rss / 1e6)
        figures.add("waiting: sent", (_sent_bytes(process.pid) - sent) / IDLE_SECONDS)


def _sent_bytes(pid: int) -> int:
    """Return what has left the host of a process."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    (fields,) = (line.split() for line in lines if line.strip().startswith("eth0:"))
    return int(fields[9])


def main(rounds: int, seed: int) -> int:
    if reason := refusal():
        print(f"left out: no hosts can be made here: {reason}")
        return 0
    figures, chance = Figures(), random.Random(seed)  # noqa: S311  repeatable, not secret
    with (
        tempfile.TemporaryDirectory(prefix="muster-bench-") as name,
        hosts(HOSTS, Path(name) / "hosts") as made,
    ):
        for _ in range(rounds):
            see(figures, made, Path(name))
            for fault in chance.sample(["killed", "cut", "frozen"], 3):
                lose(figures, made, Path(name), fault, chance.uniform(0, WORK_SECONDS))
        wait(figures, made, Path(name))
    print(f"{HOSTS} hosts, {rounds} rounds, seed {seed}")
    for line in figures.lines():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, [*sys.argv[1:], *["5", "0"][len(sys.argv) - 1 :]])))
