"""What a person does once the services are there."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from muster.contracts.environ import DEFAULT_PORT, ServiceSettings


def next_steps(url: str, data_dir: Path) -> Iterator[str]:
    """Yield lines to copy into another terminal: first what it has to be told, if anything."""
    port = urlsplit(url).port
    if port != DEFAULT_PORT:
        yield f"export MUSTER_PORT={port}"
    if data_dir != _usual_data_dir():
        yield f"export MUSTER_DATA_DIR={shlex.quote(str(data_dir))}"
    yield "muster submit -n 2 -- python train.py"
    yield "muster ps"


def _usual_data_dir() -> Path:
    return ServiceSettings.read({"HOME": os.environ.get("HOME", "/")}, cores=1).data_dir
