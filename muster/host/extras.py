"""The optional parts of the package: what this Python lacks of one, and how to install it."""

# importlib.metadata takes longer to import than most commands take, and is rarely needed.
# ruff: noqa: PLC0415

import json
import re
import shlex
from importlib.util import find_spec
from typing import Final
from urllib.parse import unquote, urlsplit

from muster.contracts.errors import MusterError

PACKAGE: Final = "muster-train"


def require_server(command: str) -> None:
    """Raise a `MusterError` if a package that only API and coordinator import is missing."""
    if missing := missing_server_packages():
        raise MusterError(
            f"`muster {command}` needs packages that are not installed ({', '.join(missing)}): "
            f"{install_command('server')}"
        )


def missing_server_packages() -> list[str]:
    """Return what API and coordinator import, by the metadata, and this Python lacks."""
    from importlib.metadata import distribution

    condition = re.compile(r"""extra == ["']server["']""")
    lines = filter(condition.search, distribution(PACKAGE).requires or [])
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    return [name for name in names if find_spec(name.replace("-", "_")) is None]


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
