"""Numbers of bytes, as people read them."""

from typing import Final

UNITS: Final = ("B", "kB", "MB", "GB", "TB")
STEP: Final = 1000


def size(count_bytes: int) -> str:
    """Return a number of bytes in the unit that leaves the fewest digits: ``11.8 kB``."""
    amount, unit = float(count_bytes), 0
    while amount >= STEP and unit < len(UNITS) - 1:
        amount, unit = amount / STEP, unit + 1
    return f"{amount:.1f} {UNITS[unit]}" if unit else f"{count_bytes} B"
