"""``python -P -m api`` serves the REST API; with ``--check`` it only checks the settings."""

import os
import sys


def main() -> int:
    """Return the exit code."""
    if sys.argv[1:] == ["--check"]:
        # Without FastAPI, because `muster up` and `muster doctor` wait for it.
        from api.startup_checks import run_checks  # noqa: PLC0415

        return run_checks(os.environ)
    from api.server import serve  # noqa: PLC0415

    return serve()


if __name__ == "__main__":
    sys.exit(main())
