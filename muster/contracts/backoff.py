"""How long a failed rank waits before it is started again.

A pure schedule: the same failures of the same rank of the same job give the same delays, so a
test can state them and a person can foretell them.
"""

import random
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """An exponential schedule with a cap and seeded jitter; all times in seconds."""

    first_seconds: float = 0.5
    factor: float = 2.0
    cap_seconds: float = 30.0
    jitter: float = 0.25
    """The delay is drawn from [1 - jitter, 1] of the scheduled one: ranks that die together do
    not come back together, and none waits longer than the schedule says."""
    reset_after_seconds: float = 60.0
    """Health for this long forgives the failures before it."""

    def delay_seconds(self, failures: int, seed: str) -> float:
        """Return the wait after the `failures`-th failure in a row (1 is the first).

        `seed` names who waits, for example ``"<job uid>/<rank>"``.
        """
        if failures < 1:
            raise ValueError(f"failures counts from 1, got {failures}")
        # The exponent is bounded before the power is taken: 2.0 ** 1100 is an OverflowError.
        doublings = min(failures - 1, 64)
        scheduled = min(self.cap_seconds, self.first_seconds * self.factor**doublings)
        draw = random.Random(f"{seed}/{failures}").random()  # noqa: S311  jitter, no secret
        return scheduled * (1.0 - self.jitter * draw)

    def failures_after(self, failures: int, healthy_seconds: float) -> int:
        """Return how many failures still count once the rank was healthy for a while."""
        return 0 if healthy_seconds >= self.reset_after_seconds else failures


DEFAULT_BACKOFF: Final = Backoff()
"""0.5 s, 1 s, 2 s, … up to 30 s; forgotten after a minute of health."""
