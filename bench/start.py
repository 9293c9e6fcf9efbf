"""How long commands take to start, compared with the imports that they need.

    python bench/start.py [rounds]

Commands and imports run in turns, so that load on the machine affects all of them; each figure is a
median. `muster ps` talks to real services, and its time includes their response.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from _services import Services

ROUNDS = 21
GOAL_SECONDS = 0.3
"""For `muster --help`."""

MUSTER = ("-P", "-m", "muster")


@dataclass(frozen=True)
class Measured:
    """A command, the imports that it needs, and the time it may take."""

    command: Sequence[str]
    imports: str
    goal_seconds: float | None = None

    @property
    def name(self) -> str:
        return " ".join(("muster", *self.command))


COMMANDS = (
    Measured(("--help",), "import click", GOAL_SECONDS),
    Measured(("ps", "--help"), "import click"),
    Measured(("ps",), "import click, httpx"),
)


def seconds(arguments: Sequence[str], environ: Mapping[str, str]) -> float:
    """Return how long Python takes with these arguments."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, *arguments], env=environ, check=True, capture_output=True, timeout=60
    )
    return time.monotonic() - began


def main(rounds: int = ROUNDS) -> int:
    found: dict[Measured, list[tuple[float, float]]] = {measured: [] for measured in COMMANDS}
    with Services() as services:
        environ = {**os.environ, "MUSTER_URL": f"http://127.0.0.1:{services.port}"}
        for _ in range(rounds):
            for measured, pairs in found.items():
                bare = seconds(("-c", measured.imports), environ)
                pairs.append((bare, seconds((*MUSTER, *measured.command), environ)))
    is_met = True
    for measured, pairs in found.items():
        bare, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
        goal = measured.goal_seconds
        is_met = is_met and (goal is None or whole <= goal)
        print(
            f"{measured.name:16} {whole * 1000:4.0f} ms, {whole / bare:.2f} x the "
            f"{bare * 1000:.0f} ms of `{measured.imports}`"
            + (f" (goal: {goal * 1000:.0f} ms)" if goal is not None else "")
        )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
