"""``muster down``: ends what `muster up` started for this data directory; ranks save first."""

import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import typer

from cli.elsewhere import ANSWER_SECONDS, answering, of_others
from cli.office import Holder, holder_of, is_held
from cli.waits import said_if_it_lasts
from muster.client import Client, ClientError
from muster.client.views import SummaryList
from muster.contracts.errors import MusterError
from muster.contracts.job import OPEN
from muster.contracts.layout import DataDirectory
from muster.processes import is_running, send_signal

LOOK_SECONDS: Final = 0.2
MOST: Final = 1000
"""Jobs of one answer."""


class NotOurs(MusterError):
    """Another user's services are not ours to end."""


def end_services(data_dir: Path) -> None:
    """End them and wait until they are gone; where nothing runs, say so."""
    files = DataDirectory(data_dir)
    holder = _awaited_holder(files)
    if holder is None:
        typer.echo(f"nothing runs for {files.root}{_elsewhere(files.root)}", err=True)
        return
    with ExitStack() as stack:
        client = _audience(holder, stack)
        if not holder.is_ending:  # a second signal would not wait for the ranks
            _ask_to_end(holder)
        typer.echo("ranks save and exit …", err=True)
        _watch(holder, client)
    typer.echo("down; jobs that are not over go on at the next: muster up", err=True)


def _awaited_holder(files: DataDirectory) -> Holder | None:
    """Return who is to end, once somebody who begins has written down who it is; None if nobody."""
    with said_if_it_lasts(f"waiting for a `muster up` that begins in {files.root} …"):
        while (holder := holder_of(files)) is None and is_held(files):
            time.sleep(LOOK_SECONDS)  # another process's lock: there is no event to wait for
    return holder


def _elsewhere(data_dir: Path) -> str:
    """Return which services a person may have meant, if others answer where they would."""
    found = answering()
    if found is None:
        return ""
    url, there = found
    others = of_others(url, there, data_dir)
    return f"; {others or f'what answers at {url} is no `muster up` of this directory'}"


def _ask_to_end(holder: Holder) -> None:
    try:
        send_signal(holder.process, signal.SIGTERM)
        send_signal(holder.process, signal.SIGCONT)  # one that was stopped could not hear it
    except PermissionError:
        raise NotOurs(
            f"the services, process {holder.process.pid}, are another user's to end"
        ) from None


def _audience(holder: Holder, stack: ExitStack) -> Client | None:
    """Return whom to ask how many ranks run; None if a setting of ours forbids it."""
    try:
        client = Client(
            holder.url,
            timeout_seconds=ANSWER_SECONDS,
            retry_seconds=0,
            ca_file=holder.ca_file,
        )
    except MusterError as error:  # services end without it
        typer.echo(f"how many ranks still run cannot be told: {error}", err=True)
        return None
    return stack.enter_context(client)


def _watch(holder: Holder, client: Client | None) -> None:
    """Wait for the end, and show how many ranks still run."""
    drawn = ""
    while is_running(holder.process):
        line = ranks_left(client) if client else ""
        if line and line != drawn:
            _draw(line)
            drawn = line
        time.sleep(LOOK_SECONDS)
    if drawn and sys.stderr.isatty():
        typer.echo(err=True)


def _draw(line: str) -> None:
    in_place = sys.stderr.isatty()
    typer.echo(f"\r{line}\x1b[K" if in_place else line, nl=not in_place, err=True)


def ranks_left(client: Client) -> str:
    """Return how many ranks run; nothing where nobody can say so any more."""
    try:
        answer = client.connection.ask(
            "GET", "/jobs/summaries", query={"status": sorted(OPEN), "limit": MOST}
        )
        jobs = answer.read_as(SummaryList).jobs
    except ClientError:
        return ""
    left = [job.living for job in jobs]
    if not any(left):
        return ""
    count, of = sum(left), sum(map(bool, left))
    return (
        f"{count} rank{'s' * (count > 1)} of {of} job{'s' * (of > 1)} still run{'s' * (count == 1)}"
    )
