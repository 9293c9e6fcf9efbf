"""A coordinator that was stopped in the middle of a transaction, and so keeps everybody else out.

Its lease runs out, but nobody can read that: the database is locked until it goes on or ends. It
has nothing left to do but to notice that it was displaced, so on this machine it is ended.
"""

from pathlib import Path
from typing import Final

import structlog

from muster.contracts.process import ProcessRecord
from muster.processes import is_running, kill, stands_still
from muster.published_address import published_address

_LOG: Final = structlog.get_logger("coordinator")


def end_if_stopped(process: ProcessRecord) -> bool:
    """End a coordinator of this machine if it stands still; return whether.

    To be asked of nobody unless the database is locked: one that only rests may go on.
    """
    is_ended = stands_still(process.pid) and is_running(process) and kill(process)
    if is_ended:
        _LOG.warning(
            f"process {process.pid} was stopped while it coordinated, and the database is locked: "
            "it was ended",
            action="coordinator_ended",
        )
    return is_ended


def last_known(address_file: Path) -> ProcessRecord | None:
    """Return who has published its address last: that can be read without the database."""
    address = published_address(address_file)
    return None if address is None else address.process
