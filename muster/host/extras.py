"""The optional parts of the package: what this Python lacks of one, and how to install it."""

# importlib.metadata takes longer to import than most commands take, and is rarely needed.
# ruff: noqa: PLC0415

import json
import re
import shlex
from typing import Final
from urllib.parse import unquote, urlsplit

from muster.contracts.errors import MusterError

PACKAGE: Final = "muster-train"


def require_server(command: str) -> None:
    """Raise a `MusterError` if a package that only API and coordinator import is missing."""
    if missing := missing_packages("server"):
        raise MusterError(
            f"`muster {command}` needs packages that are not installed ({', '.join(missing)}): "
            f"{install_command('server')}"
        )


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    from importlib.metadata import distribution

    condition = re.compile(rf"""extra == ["']{extra}["']""")
    lines = filter(condition.search, distribution(PACKAGE).requires or [])
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    return [name for name in names if not _is_installed(name)]


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from where Muster itself was installed.

    No public index has Muster. pip records the folder or the wheel that it was given (PEP 610);
    without that record it came from an index of the user's.
    """
    from importlib.metadata import distribution

    origin = json.loads(distribution(PACKAGE).read_text("direct_url.json") or "{}")
    source = unquote(urlsplit(origin.get("url", "")).path) or PACKAGE
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"


def _is_installed(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
