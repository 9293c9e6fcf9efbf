"""The services that a `muster up` keeps, found as its children."""

import psutil

from muster.contracts.rank import ProcessRecord
from muster.host.processes import identify


def kept_by(keeper: int, module: str) -> ProcessRecord | None:
    """Return the service of this `muster up` that runs `module` now, if there is one."""
    for child in psutil.Process(keeper).children():
        try:
            if child.cmdline()[-2:] == ["-m", module]:
                return identify(child.pid)
        except psutil.NoSuchProcess:
            continue
    return None
