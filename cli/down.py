"""``muster down``: ends what `muster up` started for this data directory; ranks save first."""

import signal
import sys
import time
from pathlib import Path
from typing import Final

import typer

from cli.elsewhere import answering, of_others
from cli.office import Holder, holder_of, is_held
from cli.remaining import tell_who_remains
from cli.waits import said_if_it_lasts
from muster.contracts.errors import MusterError
from muster.contracts.layout import DataDirectory
from muster.patience import Patience
from muster.processes import is_running, send_signal

LOOK_SECONDS: Final = 0.1

BEGINNERS: Final = Patience(seconds=20.0, pause_seconds=LOOK_SECONDS)
"""Whoever begins has found a place by then, or given up."""


class NotOurs(MusterError):
    """Another user's services are not ours to end."""


class UnknownHolder(MusterError):
    """Somebody holds the lock and nobody can say who: their record does not lead to them."""

    def __init__(self, files: DataDirectory) -> None:
        super().__init__(
            f"a `muster up` holds {files.root}, and its record there, {files.keeper.name}, does "
            "not lead to its process (it may run in a container, or the record was removed, "
            "damaged or never written): end that `muster up` where it runs"
        )


def end_services(data_dir: Path) -> None:
    """End them and wait until they are gone; where nothing runs, say so.

    Raises `UnknownHolder` where who runs cannot be told, `NotOurs` where it is another user's.
    """
    files = DataDirectory(data_dir)
    holder = _awaited_holder(files)
    if holder is None:
        typer.echo(f"nothing runs for {files.root}{_elsewhere(files.root)}", err=True)
        return
    if not holder.is_ending:  # a second signal would not wait for the ranks
        _ask_to_end(holder)
    typer.echo("ranks save and exit …", err=True)
    _watch(holder)
    typer.echo("down; jobs that are not over go on at the next: muster up", err=True)


def _awaited_holder(files: DataDirectory) -> Holder | None:
    """Return who is to end, once somebody who begins has written down who it is; None if nobody.

    Raises `UnknownHolder` where that is not written down, or not so that it can be believed.
    """
    with said_if_it_lasts(f"waiting for a `muster up` that begins in {files.root} …"):
        # Another process's lock: there is no event to wait for.
        if BEGINNERS.outlast(lambda: holder_of(files) is None and is_held(files)):
            raise UnknownHolder(files)
    return holder_of(files)


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


def _watch(holder: Holder) -> None:
    """Wait for the end, and show how many ranks still run."""
    in_place = sys.stderr.isatty()
    drawn = []

    def draw(line: str) -> None:
        drawn.append(line)
        typer.echo(f"\r{line}\x1b[K" if in_place else line, nl=not in_place, err=True)

    def has_ended(seconds: float) -> bool:
        time.sleep(seconds)
        return not is_running(holder.process)

    tell_who_remains(holder.url, holder.ca_file, has_ended, draw)
    if drawn and in_place:
        typer.echo(err=True)
