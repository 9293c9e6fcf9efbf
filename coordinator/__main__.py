"""``python -P -m coordinator``: the service; with ``JOB_ID`` set, `muster run` of that job."""

import asyncio
import os
import sys
from argparse import ArgumentParser

from coordinator.service import Service
from database.engine import Database
from database.errors import LeaseLost
from database.replication.outbox import Replication
from muster.contracts.errors import MusterError
from muster.contracts.job.retry import INTERRUPTED_CODE, REPLACED_CODE
from muster.contracts.settings.services import ServiceSettings
from muster.host import processes
from muster.host.limits import ShellLimits, usable_processors
from muster.host.private import make_private
from muster.runtime import service_log
from muster.runtime.stderr_messages import print_stderr


def main() -> int:
    """Run the service, or become the process of one job; return the exit code."""
    ArgumentParser(prog="python -P -m coordinator", description=__doc__).parse_args()
    if os.environ.get("JOB_ID"):
        run = processes.module_command("cli", "run")
        os.execv(run[0], run)  # noqa: S606  our own command, which reads the job from the environment
    processes.exit_with_parent(os.environ)
    processes.await_start(os.environ)
    service_log.configure("coordinator")
    try:
        settings = ServiceSettings.read(os.environ, cores=usable_processors())
        limits = ShellLimits.replaced()
        make_private(settings.data_dir)
        database = Database.open(settings.database, replication=Replication.of(settings))
        try:
            service = Service(database, settings, os.environ, limits)
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
