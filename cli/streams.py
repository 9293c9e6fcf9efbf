"""Standard input, output and errors of a command that was started without them, as cron may do.

The next file that is opened would get the free number, and what is said would go into a database.
"""

import os
import sys


def stand_in_for_closed() -> None:
    """Put the null device where one of the three is closed; nothing that is open is touched."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004  the three
        os.set_inheritable(number, True)  # noqa: FBT003  its only parameter; ranks get them, too
    os.close(number)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  for as long as the process lives
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
