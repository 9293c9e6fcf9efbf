"""One line per rank, redrawn in place on a terminal, now and then elsewhere."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

BAR_WIDTH: Final = 24
QUIET_SECONDS: Final = 2.0
"""Off a terminal every drawing stays, so there are fewer of them."""


class Board:
    """Draws the workers of a job's summary."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._in_place = out.isatty()
        self._drawn = 0
        self._next = 0.0

    def draw(self, summary: Mapping[str, Any]) -> None:
        """Draw, if it is time and there is anything to see."""
        if not any(worker["total_steps"] for worker in summary["workers"]):
            return
        if self._in_place or time.monotonic() >= self._next:
            self._next = time.monotonic() + QUIET_SECONDS
            self._put([_line(worker) for worker in summary["workers"]])

    def say(self, words: str) -> None:
        """Print a line that stays, and draw anew below it."""
        self._drawn = 0
        print(f"   {words}", file=self._out, flush=True)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Draw the end, and leave it there."""
        self._put([_line(worker) for worker in summary["workers"]])
        self._drawn = 0

    def _put(self, lines: Sequence[str]) -> None:
        if self._in_place and self._drawn:
            self._out.write(f"\x1b[{self._drawn}A")
        end = "\x1b[K\n" if self._in_place else "\n"
        self._out.write("".join(f"   {line}{end}" for line in lines))
        self._out.flush()
        self._drawn = len(lines)


def _line(worker: Mapping[str, Any]) -> str:
    step, total = worker["step"], worker["total_steps"] or 0
    filled = BAR_WIDTH * step // total if total else 0
    bar = "█" * filled + "·" * (BAR_WIDTH - filled)
    loss = "" if worker["loss"] is None else f"loss {worker['loss']:.4f}"
    saved = worker["last_checkpoint_step"]
    checkpoint = "" if saved is None else f"checkpoint {saved}"
    return (
        f"rank {worker['rank']}  {bar}  {step:>4}/{total:<4} {loss:<12}  {checkpoint:<16}"
        f"{worker['state']}"
    )
