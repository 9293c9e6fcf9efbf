"""Cuts the power in many random histories of saves, kills and restarts.

``python -m stress.power_cuts [HISTORIES] [SEED]`` is the long form of
tests/integration/checkpoints/test_crashes.py: a history is a few processes that save, are killed
anywhere and are replaced. After each of their operations, every file system that POSIX allows to be
left (or a random sample) is given to the production reader. No checkpoint may be lost or torn.
"""

import random
from pathlib import Path

from stress.runner import Report, chance, main, say
from tests.support.crash_histories import History, Session, explore

STATES_PER_OPERATION = 400


def run(_directory: Path, histories: int = 100, seed: int = 0) -> Report:
    """Explore so many histories."""
    report, states = Report(), 0
    for number in range(histories):
        findings = explore(history(chance(f"{seed}/{number}")), limit=STATES_PER_OPERATION)
        states += findings.states
        report.faults += [
            f"history {number}: {count} x {what}" for what, count in findings.violations.items()
        ]
        say(f"{number + 1} histories, {states} states, {len(report.faults)} violations")
    return report


def history(draw: random.Random) -> History:
    sessions = []
    step = 0
    for generation in range(draw.randint(2, 5)):
        first = max(1, step - draw.randint(0, 3))
        step = first + draw.randint(1, 4)
        lives_for = draw.choice([10**9, draw.randint(1, 150)])
        sessions.append(Session(generation, tuple(range(first, step)), lives_for))
    return History(keep_last=draw.randint(1, 3)).play(*sessions)


if __name__ == "__main__":
    main(run)
