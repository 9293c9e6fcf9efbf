"""What a person does once the services are there."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cli.certificate import own_names
from cli.elsewhere import export_of
from muster.contracts.environ import (
    CA_FILE,
    LOCAL_NAMES,
    TOKEN,
    DoorSettings,
    ServiceSettings,
    api_url,
)

NO_NAME: Final = "NAME"
"""Written where only the person knows which names a certificate is for."""


def next_steps(url: str, data_dir: Path, door: DoorSettings) -> Iterator[str]:
    """Yield lines to copy into another terminal: first what it has to be told, if anything."""
    yield from _way_to_muster()
    yield from _way_there(url, door)
    if door.require_token:
        yield _token_of(door)
    if data_dir != _usual_data_dir():
        yield export_of(str(data_dir))
    yield "muster submit -n 2 -- python train.py"
    yield "muster ps"


def another_port(usual: int, used: int) -> str:
    """Return why the services are not where they usually are."""
    return f"port {usual} is taken, so port {used} is used (MUSTER_PORT chooses another)"


def _way_to_muster() -> Iterator[str]:
    """Yield what makes `muster` known in a new terminal, unless one knows it already."""
    programs = Path(sys.prefix, "bin")
    activate = programs / "activate"
    if sys.prefix == sys.base_prefix or not activate.exists():
        return
    # Whoever has activated an environment has done so in this terminal alone.
    passing = programs if os.environ.get("VIRTUAL_ENV") else None
    usual = [way for way in os.get_exec_path() if Path(way) != passing]
    if shutil.which("muster", path=os.pathsep.join(usual)) is None:
        yield f"source {shlex.quote(str(activate))}"


def _way_there(url: str, door: DoorSettings) -> Iterator[str]:
    port = str(urlsplit(url).port)
    if url == api_url({}):
        return
    if url == api_url({"MUSTER_PORT": port}):
        yield f"export MUSTER_PORT={port}"
        return
    names = own_names(door.tls_certfile, door.tls_keyfile) if door.tls_certfile else ()
    yield f"export MUSTER_URL={_called(url, _name(url, door, names))}"
    if names:
        yield f"export {CA_FILE}={shlex.quote(str(door.tls_certfile))}"


def _token_of(door: DoorSettings) -> str:
    """Return how to show a token; no text of one is known here."""
    if door.token_sha256 is None:
        return f"export {TOKEN}=mst_…"
    return f"export {TOKEN}=…  # that of the service, or one that starts with mst_"


def _name(url: str, door: DoorSettings, names: Sequence[str]) -> str:
    """Return a name by which a client may call the service, and that its certificate proves."""
    host = urlsplit(url).hostname or ""
    if door.tls_certfile is None:
        return host
    answered_to = [host, *LOCAL_NAMES, *sorted(door.allowed_hosts)]
    if names:
        return next((name for name in answered_to if name in names), NO_NAME)
    # Nobody signs a certificate for the loopback of a machine.
    return next((name for name in answered_to if name not in LOCAL_NAMES), NO_NAME)


def _called(url: str, name: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{f'[{name}]' if ':' in name else name}:{parts.port}"


def _usual_data_dir() -> Path:
    return ServiceSettings.read({"HOME": os.environ.get("HOME", "/")}, cores=1).data_dir
