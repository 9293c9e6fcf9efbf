"""Whether this process can look at others: every look into /proc takes a descriptor or two.

To whoever has none left, everybody there would seem to be gone. So whoever is about to act on who
is gone asks first.
"""

import os
from contextlib import ExitStack
from typing import Final

FOR_A_LOOK: Final = 4
"""At most so many are open at once while /proc is searched, and what is found there is ended."""


def require_descriptors(count: int = FOR_A_LOOK) -> None:
    """Raise OSError unless so many more files can be opened."""
    with ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open("/", os.O_PATH | os.O_CLOEXEC))
