"""``muster``, the command; ``python -P -m muster MODULE`` runs one of our processes.

In a checkout the packages of the services are beside `muster`. The wheel has them in
``muster/_services``, so that it adds one name to site-packages. Only processes that run none of a
user's code have that folder on their path.
"""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Final

SERVICES: Final = ("api", "cli", "coordinator", "database", "worker")
SECRETS: Final = ("MUSTER_DATABASE_URL", "MUSTER_TOKEN", "S3_ACCESS_KEY", "S3_SECRET_KEY")


def main() -> None:
    """Run the command; the entry point of the script `muster`."""
    _read_secrets()
    _find_services()
    import_module("cli.main").main()


def _read_secrets() -> None:
    """Set NAME to the content of the file NAME_FILE, as images take the secrets of an engine."""
    for name in SECRETS:
        file = os.environ.pop(f"{name}_FILE", None)
        if file and not os.environ.get(name):
            try:
                path = os.path.expanduser(file)  # noqa: PTH111  never raises
                os.environ[name] = Path(path).read_text().removesuffix("\n")
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is no text"
                what = f"{name}_FILE: {file} cannot be read ({why})"
                sys.stderr.write(f"{what}: correct the path, or set {name}\n")
                sys.exit(2)


def _find_services() -> None:
    library = Path(__file__).parent
    services = library / "_services"
    # First: PYTHONPATH may lead to a user's own `api` or `worker`.
    sys.path.insert(0, str(services if services.is_dir() else library.parent))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].partition(".")[0] in SERVICES:
        from runpy import run_module

        _read_secrets()
        _find_services()
        run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    else:
        main()
