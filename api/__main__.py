"""``python -P -m api`` serves the REST API.

``--check`` only checks the settings, and ``--check --store`` the object store, too.
``--backup FILE`` copies the database, and ``--count`` prints how many jobs it has.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from database.engine import Database


def main() -> int:
    """Return the exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--check"]:
        # Without FastAPI, because `muster up` and `muster doctor` wait for it.
        from api.startup_checks import run_checks  # noqa: PLC0415

        return run_checks(os.environ, is_store_asked="--store" in arguments)
    if arguments[:1] == ["--backup"]:
        return back_up(Path(arguments[1]))
    if arguments[:1] == ["--count"]:
        return count_jobs()
    ArgumentParser(prog="python -P -m api", description=__doc__).parse_args()
    from api.server import serve  # noqa: PLC0415

    return serve()


def back_up(file: Path) -> int:
    """Copy the database to `file` and print where its jobs keep checkpoints, as a JSON list."""
    from database.jobs import Jobs  # noqa: PLC0415  as above

    def copy(database: Database) -> list[str]:
        database.back_up(file)
        return Jobs(database).checkpoint_dirs()

    return _print_from_database(copy)


def count_jobs() -> int:
    """Print how many jobs are unfinished, and how many there are, as a JSON list."""
    from database.jobs import Jobs  # noqa: PLC0415  as above
    from muster.contracts.job.status import TERMINAL  # noqa: PLC0415

    def count(database: Database) -> list[int]:
        counts = Jobs(database).statuses()
        return [
            sum(number for status, number in counts.items() if status not in TERMINAL),
            sum(counts.values()),
        ]

    return _print_from_database(count)


def _print_from_database(read: Callable[[Database], object]) -> int:
    from database.engine import existing  # noqa: PLC0415  as above
    from muster.contracts.errors import MusterError  # noqa: PLC0415
    from muster.contracts.settings.services import ServiceSettings  # noqa: PLC0415
    from muster.host.limits import usable_processors  # noqa: PLC0415
    from muster.runtime.stderr_messages import print_stderr  # noqa: PLC0415

    try:
        settings = ServiceSettings.read(os.environ, cores=usable_processors())
        with existing(settings.database) as database:
            if database is not None:
                print(json.dumps(read(database)))  # noqa: T201  the result
                return 0
        problem = f"there is no database in {settings.data_dir} yet"
    except MusterError as error:
        problem = str(error)
    print_stderr(f"muster: {problem}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
