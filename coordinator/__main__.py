"""``python -P -m coordinator``: the service; with ``JOB_ID`` set, one job in the foreground."""

import asyncio
import logging
import os
import sys

from coordinator import foreground
from coordinator.service import Service
from database.engine import Database
from database.errors import LeaseLost
from muster.contracts.errors import MusterError
from muster.contracts.retry import INTERRUPTED_CODE, REPLACED_CODE
from muster.contracts.settings import ServiceSettings
from muster.host import processes
from muster.host.limits import ShellLimits
from muster.host.private import make_private
from muster.runtime import service_log
from muster.runtime.stderr_messages import print_stderr


def main() -> int:
    """Run the service or one job; return the exit code."""
    in_foreground = bool(os.environ.get("JOB_ID"))
    processes.exit_with_parent(os.environ)
    # In the foreground the job's events are printed; the log only holds what went wrong.
    service_log.configure("coordinator", logging.WARNING if in_foreground else logging.INFO)
    try:
        settings = ServiceSettings.read(os.environ, cores=os.cpu_count() or 1)
        if in_foreground:
            return foreground.run(settings, os.environ)
        limits = ShellLimits.replaced()
        make_private(settings.data_dir)
        database = Database.open(settings.database_url)
        try:
            service = Service(database, settings, os.environ, limits, forks_agents=True)
            asyncio.run(service.run())
        finally:
            database.close()
    except LeaseLost as error:
        print_stderr(f"coordinator: {error}")
        return REPLACED_CODE
    except KeyboardInterrupt:  # before there was anything to shut down
        return INTERRUPTED_CODE
    except MusterError as error:
        print_stderr(f"coordinator: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
