"""Services that answer where a person's commands look, and keep their data somewhere else."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cli.own_up import own_up
from muster.contracts.environ import LOCAL_NAMES
from muster.contracts.errors import MusterError

ANSWER_SECONDS: Final = 2.0
"""The API may be on its way out, or stand still."""


def others_than(data_dir: Path) -> str | None:
    """Return a sentence on who answers for other data than this, if anybody does."""
    if own_up() is not None:
        return None
    found = answering()
    return of_others(*found, data_dir) if found else None


def answering() -> tuple[str, str] | None:
    """Return where somebody answers, and where their data is."""
    from muster.client import Client  # noqa: PLC0415  brings in httpx

    try:
        with Client(timeout_seconds=ANSWER_SECONDS, retry_seconds=0) as client:
            return client.url, client.version().data_dir
    except MusterError:
        return None


def of_others(url: str, there: str, data_dir: Path) -> str | None:
    """Return that sentence of a service at `url` whose data is `there`; None if it is this."""
    if urlsplit(url).hostname not in LOCAL_NAMES:
        return f"what answers at {url} has its data on a machine of its own"
    if there in {"", str(data_dir)}:
        return None
    return f"what answers at {url} has other data; for that: {export_of(there)}"


def unlike_here(environ: Mapping[str, str], directory: Path) -> str | None:
    """Return a sentence on the data that `make up` keeps in `directory`, where it is not meant."""
    here = directory / ".muster"
    if environ.get("MUSTER_DATA_DIR") or not here.is_dir():
        return None
    return f"{here} is another installation, of `make up`; for that: {export_of(str(here))}"


def export_of(data_dir: str) -> str:
    """Return the line to type before commands that are for another data directory."""
    return f"export MUSTER_DATA_DIR={shlex.quote(data_dir)}"
