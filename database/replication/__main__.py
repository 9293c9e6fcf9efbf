"""``python -P -m muster database.replication``: a copy of the database, and what it copies.

``lead DATABASE SOCKET MEMBERS`` serves the rows. ``follow DATABASE`` keeps a copy, from the stream
on standard input and output, and writes its position on standard error, as JSON. ``position
DATABASE`` prints that of a database which no process uses.
"""

import asyncio
import os
import sqlite3
import sys
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec

from database.replication.copy import position_of
from database.replication.follower import follow
from database.replication.leader import lead
from muster.contracts.errors import WireError
from muster.contracts.position import Position
from muster.host import processes
from muster.runtime.stderr_messages import print_stderr, print_stdout


def main() -> int:
    """Return the exit code."""
    mode, database, *others = sys.argv[1], *map(Path, sys.argv[2:])
    os.umask(0o177)
    try:
        if mode == "lead":
            processes.exit_with_parent(os.environ)
            processes.unblock_sigint()
            with suppress(KeyboardInterrupt):
                asyncio.run(lead(database, *others))
        elif mode == "follow":
            follow(database, FileIO(0), FileIO(1, "w"), lambda at: print_stderr(_text(at)))
        else:
            print_stdout(_text(position_of(database)))
    except (OSError, sqlite3.Error, WireError, msgspec.MsgspecError) as error:
        why = f"cannot be copied ({error}): look at its disk and at that of the other machine"
        print_stderr(f"replication: {database} {why}; it goes on with the next start")
        return 1
    return 0


def _text(position: Position | None) -> str:
    return msgspec.json.encode(position).decode()


if __name__ == "__main__":
    sys.exit(main())
