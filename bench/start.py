"""How long commands take to start, beside the imports that they cannot do without.

    python bench/start.py [rounds]

Processes in turns, so that a busy moment hits all alike; the median of each. `muster ps` asks real
services, and its time holds their answer.
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
MOST = 1.5
"""Times its imports, a command may take."""

MUSTER = ("-m", "cli")


@dataclass(frozen=True)
class Contest:
    """A command, and the imports it is measured by."""

    command: Sequence[str]
    imports: str

    @property
    def name(self) -> str:
        return " ".join(("muster", *self.command))


CONTESTS = (
    Contest(("--help",), "import click"),
    Contest(("ps", "--help"), "import click"),
    Contest(("ps",), "import click, httpx"),
)


def seconds(words: Sequence[str], environ: Mapping[str, str]) -> float:
    """Return how long a Python with these words takes."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, *words], env=environ, check=True, capture_output=True, timeout=60
    )
    return time.monotonic() - began


def main(rounds: int = ROUNDS) -> int:
    found: dict[Contest, list[tuple[float, float]]] = {contest: [] for contest in CONTESTS}
    with Services() as services:
        environ = {**os.environ, "MUSTER_URL": f"http://127.0.0.1:{services.port}"}
        for _ in range(rounds):
            for contest, pairs in found.items():
                bare = seconds(("-c", contest.imports), environ)
                pairs.append((bare, seconds((*MUSTER, *contest.command), environ)))
    is_met = True
    for contest, pairs in found.items():
        bare, whole = (statistics.median(times) for times in zip(*pairs, strict=True))
        is_met = is_met and whole <= MOST * bare
        print(
            f"{contest.name:16} {whole * 1000:4.0f} ms, {whole / bare:.2f} x the "
            f"{bare * 1000:.0f} ms of `{contest.imports}` (goal: {MOST} x)"
        )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
