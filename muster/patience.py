"""Patience: to look again and again until nothing is left, and not for ever.

What was killed needs a moment to be gone, and may have started others until then. Whoever ends
processes says how long that may take, and why.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long one goes on until nothing is left, and how often one looks."""

    seconds: float
    pause_seconds: float

    def outlast(self, look: Callable[[], int]) -> int:
        """Look until nothing is left; return how much was, at the last look, if patience is over.

        A look returns how much it found; whoever wants that to go makes it go in the same look.
        The calling thread sleeps between two.
        """
        deadline = time.monotonic() + self.seconds
        while (left := look()) and time.monotonic() <= deadline:
            time.sleep(self.pause_seconds)
        return left
