"""Standard input, output and errors as a command needs them, however it was started.

Cron may start it without them: the next file that is opened would get the free number, and what is
said would go into a database. And a terminal may have no UTF-8, where a program's line has.
"""

import io
import os
import sys


def spell_out_unknown() -> None:
    r"""Let standard output spell out what its encoding lacks (``\u2026``), as errors do anyway."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


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
