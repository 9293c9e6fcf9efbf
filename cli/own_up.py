"""The `muster up` of one's own behind what a command talks to, if there is one.

It has written down where its API is, so nobody need be told. And it starts that again whenever it
ends: on a busy machine this takes longer than somebody who has forgotten `up` should wait to hear
that nobody answers.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from cli.office import Holder, holder_of
from cli.own_settings import own_settings
from cli.waits import said_if_it_lasts
from muster.contracts.environ import CA_FILE, api_url
from muster.contracts.errors import MusterError
from muster.contracts.layout import DataDirectory

RESTART_SECONDS: Final = 20.0
"""What does not listen by then does not come up: a command should say so."""

LOOK_SECONDS: Final = 0.1
PROBE_SECONDS: Final = 1.0


def own_up() -> Holder | None:
    """Return the `muster up` of this data directory, unless others are meant."""
    try:
        up = holder_of(DataDirectory(own_settings().data_dir))
        return up if up and _is_meant(up, os.environ) else None
    except (MusterError, OSError):
        return None  # nothing can be up for such settings, or for a directory that is gone


def _is_meant(up: Holder, environ: Mapping[str, str]) -> bool:
    if environ.get("MUSTER_URL"):
        return up.is_at(api_url(environ))
    # Whether it speaks TLS is its own affair, and need not be said to those who only ask.
    return environ.get("MUSTER_PORT", "") in {"", "0", str(urlsplit(up.url).port)}


def way_to(up: Holder | None) -> tuple[str | None, str | None]:
    """Return the URL of its API and the file of certificates to trust there.

    None of either is what the environment says.
    """
    if up is None:
        return None, None
    url = None if os.environ.get("MUSTER_URL") else up.url
    is_trusted = up.ca_file and not os.environ.get(CA_FILE) and Path(up.ca_file).is_file()
    return url, up.ca_file if is_trusted else None


def await_restart(up: Holder) -> None:
    """Wait while its API is about to listen, and for `RESTART_SECONDS` at most."""
    if _listens(up.url):
        return
    deadline = time.monotonic() + RESTART_SECONDS
    with said_if_it_lasts(
        f"waiting until `muster up` (process {up.process.pid}) has the API at {up.url} again …"
    ):
        while not _listens(up.url) and time.monotonic() < deadline and _starts_it_again():
            time.sleep(LOOK_SECONDS)  # another process's listening: there is no event to wait for


def _starts_it_again() -> bool:
    up = own_up()
    return up is not None and not up.is_ending


def _listens(url: str) -> bool:
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname, address.port), PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True  # whatever it is, it is not that it has yet to start
    return True
