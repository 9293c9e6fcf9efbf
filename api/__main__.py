"""``python -P -m api`` serves the REST API.

``--check`` only checks the settings, and ``--check --store`` the object store, too.
``--backup FILE`` copies the database.
"""

import json
import os
import sys
from argparse import ArgumentParser
from pathlib import Path


def main() -> int:
    """Return the exit code."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--check"]:
        # Without FastAPI, because `muster up` and `muster doctor` wait for it.
        from api.startup_checks import run_checks  # noqa: PLC0415

        return run_checks(os.environ, is_store_asked="--store" in arguments)
    if arguments[:1] == ["--backup"]:
        return back_up(Path(arguments[1]))
    ArgumentParser(prog="python -P -m api", description=__doc__).parse_args()
    from api.server import serve  # noqa: PLC0415

    return serve()


def back_up(file: Path) -> int:
    """Copy the database to `file` and print where its jobs keep checkpoints, as a JSON list."""
    from database.engine import existing  # noqa: PLC0415  as above
    from database.jobs import Jobs  # noqa: PLC0415
    from muster.contracts.errors import MusterError  # noqa: PLC0415
    from muster.contracts.settings.services import ServiceSettings  # noqa: PLC0415
    from muster.host.limits import usable_processors  # noqa: PLC0415
    from muster.runtime.stderr_messages import print_stderr  # noqa: PLC0415

    try:
        settings = ServiceSettings.read(os.environ, cores=usable_processors())
        with existing(settings.database) as database:
            if database is not None:
                database.back_up(file)
                print(json.dumps(Jobs(database).checkpoint_dirs()))  # noqa: T201  the result
                return 0
        problem = f"there is no database in {settings.data_dir} yet"
    except MusterError as error:
        problem = str(error)
    print_stderr(f"muster: {problem}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
