"""``muster up`` and ``muster down``: start and end the services of a data directory."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from cli.config import service_settings
from cli.doctor import require_startable
from cli.output import notice_if_slow
from cli.service_record import (
    ServiceRecord,
    is_locked,
    is_serving,
    open_for_append,
    read_record,
)
from cli.supervisor import (
    POLL_SECONDS,
    RANKS_SECONDS,
    command,
    describe_ranks,
    run_services,
    say,
    say_ready,
)
from muster.contracts.errors import MusterError
from muster.contracts.paths import DataDir
from muster.contracts.settings import AccessSettings, ServiceSettings
from muster.host.processes import is_running, send_signal

RECORD_SECONDS: Final = 20.0
"""Time for a starting `up` to write its record, or to give up."""

LOG_LIMIT_BYTES: Final = 8 << 20
LOG_TAIL_LINES: Final = 5


class NotUp(MusterError):
    """The services ended before they served."""

    def __init__(self, log: Path, tail: str) -> None:
        super().__init__(f"the services did not come up; their log is {log}:\n{tail}")


class CannotEnd(MusterError):
    """A `muster up` runs that this command cannot end."""


@click.command()
@click.option("-d", "--detach", is_flag=True, help="Return once they serve; muster down ends them.")
def up(*, detach: bool) -> None:
    """Run the API and the coordinator on this machine.

    They run until Ctrl-C, and either is restarted whenever it dies.

    MUSTER_PORT, MUSTER_HOST and MUSTER_DATA_DIR in the environment choose the port, the
    address and the directory of the data; muster config show has them all.
    """
    settings = service_settings()
    require_startable(os.environ)
    if detach:
        start_detached(settings, os.environ)
    else:
        sys.exit(run_services(settings, os.environ))


@click.command()
def down() -> None:
    """Stop the services; every rank saves first.

    Ends the `muster up` of this data directory, as Ctrl-C does there. The jobs go on at the
    next start.
    """
    end_services(DataDir(service_settings().data_dir))


def start_detached(settings: ServiceSettings, environ: Mapping[str, str]) -> None:
    """Start `muster up` without a terminal, unless it runs, and return once it serves.

    Raises `NoDataDirectory`, and `NotUp` if the services end instead. Ctrl-C ends them.
    """
    files = DataDir(settings.data_dir)
    record = read_record(files)
    if record is not None and record.is_ending:
        with notice_if_slow("waiting until the previous services have ended …"):
            while is_running(record.process):
                time.sleep(POLL_SECONDS)
    elif record is not None and _await_serving(files, None):
        say(f"up already, at {record.url}, with its data in {files.root}")
        return
    with suppress(OSError):  # there is no log yet
        if files.keeper_log.stat().st_size > LOG_LIMIT_BYTES:
            files.keeper_log.replace(files.keeper_log.with_name(f"{files.keeper_log.name}.1"))
    with open_for_append(files, files.keeper_log) as log:
        say(f"starting, with the data in {files.root}; log: {files.keeper_log} …")
        offset = log.tell()
        process = subprocess.Popen(
            command("cli", "up"),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        record = _await_serving(files, process)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        raise
    if record is None:
        tail = files.keeper_log.read_bytes()[offset:].decode(errors="replace").splitlines()
        raise NotUp(files.keeper_log, "\n".join(tail[-LOG_TAIL_LINES:]) or "(empty)")
    say_ready(record.url, files.root, AccessSettings.read(environ))
    say("to end the services: muster down")


def end_services(files: DataDir) -> None:
    """End the `muster up` of a data directory and wait until it is gone; raises `CannotEnd`."""
    deadline = time.monotonic() + RECORD_SECONDS
    with notice_if_slow(f"waiting for a `muster up` that starts in {files.root} …"):
        while (record := read_record(files)) is None and is_locked(files):
            if time.monotonic() > deadline:
                raise CannotEnd(
                    f"a `muster up` holds {files.root}, but {files.keeper.name} there does not "
                    "name its process (it may run in a container): end it where it runs"
                )
            time.sleep(POLL_SECONDS)
    if record is None:
        click.echo(
            f"nothing runs for {files.root}; MUSTER_DATA_DIR names another directory", err=True
        )
        return
    try:
        if not record.is_ending:
            send_signal(record.process, signal.SIGTERM)
    except PermissionError:
        raise CannotEnd(
            f"the services (process {record.process.pid}) belong to another user, who has to end "
            "them"
        ) from None
    click.echo("ranks checkpoint and exit …", err=True)
    reported = ""
    while is_running(record.process):
        report = describe_ranks(record.url, record.ca_file)
        if report not in {"", reported}:
            click.echo(report, err=True)
            reported = report
        time.sleep(RANKS_SECONDS)
    click.echo("down; unfinished jobs go on at the next: muster up", err=True)


def _await_serving(
    files: DataDir, starting: "subprocess.Popen[bytes] | None"
) -> ServiceRecord | None:
    """Return the record of services that serve; None if `up` ends before that.

    If another `muster up` was faster than `starting`, that one is awaited.
    """
    while (starting is not None and starting.poll() is None) or is_locked(files):
        record = read_record(files)
        if record is not None and not record.is_ending and is_serving(record.url):
            return record
        time.sleep(POLL_SECONDS)
    return None
