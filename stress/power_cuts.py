"""Cuts the power in many random histories of saves, kills and restarts.

    python stress/power_cuts.py [histories] [seed]

The long form of tests/integration/checkpoints/test_crashes.py: a history is a few processes that
save, are killed anywhere and are replaced. After each of their operations, every file system that
POSIX allows to be left (or a random sample) is given to the production reader. The exit code is 1
if a checkpoint was lost or torn.
"""

import random
import sys
from collections import Counter

from tests.support.crash_histories import History, Session, explore

STATES_PER_OPERATION = 400


def history(draw: random.Random) -> History:
    sessions = []
    step = 0
    for generation in range(draw.randint(2, 5)):
        first = max(1, step - draw.randint(0, 3))
        step = first + draw.randint(1, 4)
        lives_for = draw.choice([10**9, draw.randint(1, 150)])
        sessions.append(Session(generation, tuple(range(first, step)), lives_for))
    return History(keep_last=draw.randint(1, 3)).play(*sessions)


def main(histories: int, seed: int) -> int:
    states = 0
    violations: Counter[str] = Counter()
    for number in range(histories):
        findings = explore(
            history(random.Random(f"{seed}/{number}")),  # noqa: S311  no secret
            limit=STATES_PER_OPERATION,
        )
        states += findings.states
        violations += findings.violations
        print(f"{number + 1} histories, {states} states, violations: {dict(violations)}")
    return 1 if violations else 0


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1:]]
    sys.exit(main(*numbers, *(100, 0)[len(numbers) :]))
