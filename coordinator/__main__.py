"""``python -P -m coordinator``: the daemon; with ``JOB_ID`` set, one job in the foreground."""

import asyncio
import logging
import os
import sys

from coordinator import foreground
from coordinator.service import Service
from coordinator.stopped_predecessor import end_if_stopped, last_known
from muster import journal, lifeline
from muster.contracts.endings import INTERRUPTED_CODE, REPLACED_CODE
from muster.contracts.environ import ServiceSettings
from muster.contracts.errors import MusterError
from muster.contracts.layout import DataDirectory
from muster.descriptors import DescriptorLimits
from muster.remarks import remark
from store.database import Database
from store.errors import LeaseLost, StoreLocked


def main() -> int:
    """Wire the process, run it, and map its errors to a sentence and an exit code."""
    in_foreground = bool(os.environ.get("JOB_ID"))
    # In the foreground the job's events are told in words; the journal has only what went wrong.
    lifeline.follow(os.environ)
    journal.configure("coordinator", logging.WARNING if in_foreground else logging.INFO)
    try:
        settings = ServiceSettings.read(os.environ, cores=os.cpu_count() or 1)
        if in_foreground:
            return foreground.run(settings, os.environ)
        limits = DescriptorLimits.raised()
        database = _open(settings)
        try:
            asyncio.run(Service(database, settings, os.environ, limits).run())
        finally:
            database.close()
    except LeaseLost as error:
        remark(f"coordinator: {error}")
        return REPLACED_CODE
    except KeyboardInterrupt:  # before there was anything to shut down
        return INTERRUPTED_CODE
    except MusterError as error:
        remark(f"coordinator: {error}")
        return 1
    return 0


def _open(settings: ServiceSettings) -> Database:
    try:
        return Database.open(settings.database_url)
    except StoreLocked:
        former = last_known(DataDirectory(settings.data_dir).coordinator_address)
        if former is None or not end_if_stopped(former):
            raise
        return Database.open(settings.database_url)


if __name__ == "__main__":
    sys.exit(main())
