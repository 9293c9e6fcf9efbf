"""A command's connection to the API, and what several commands ask for.

HTTP is imported when a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

import click

from cli.config import apply_config_file
from cli.output import ShellPath, notice_if_slow, say
from cli.services.record import address_of, find_own_services
from muster.contracts.errors import MusterError
from muster.contracts.job.status import JobStatus

if TYPE_CHECKING:
    from muster import Client
    from muster.client import Job

CONNECT_SECONDS: Final = 2.0
"""How long a command waits for an API if no `muster up` runs here: perhaps it was forgotten."""

RETRY_SECONDS: Final = 10.0
"""The same if one runs, which may be restarting its API, and how long a question is repeated."""

ATTACHED_SECONDS: Final = 60.0
"""How long a command that watches a job repeats a question."""

LEADER_SECONDS: Final = 30.0
"""For nodes that were started a moment ago, on a busy machine: the election, and the API."""

_COMPLETION_SECONDS: Final = 1.0
_COMPLETION_JOBS: Final = 50

python_option: Final = click.option(
    "--python",
    type=ShellPath(exists=True, dir_okay=False, executable=True),
    metavar="PATH",
    help="Interpreter of the ranks. Default: the first python on PATH.",
)


@contextmanager
def connected(retry_seconds: float = RETRY_SECONDS) -> Iterator[Client]:
    """Open a client of the API once that answers; it repeats questions for `retry_seconds`."""
    from muster import Client  # noqa: PLC0415  imports httpx
    from muster.client.errors import Busy  # noqa: PLC0415

    up = find_own_services()
    url, ca_file = address_of(up)
    with Client(url, retry_seconds=retry_seconds, ca_file=ca_file) as client:
        # Asked here because an order is sent only once, perhaps while the API restarts.
        notice = notice_if_slow(f"waiting for the API at {client.url} …") if up else nullcontext()
        deadline = client.connection.monotonic() + (RETRY_SECONDS if up else CONNECT_SECONDS)
        with notice:
            try:
                client.connection.ask("GET", "/livez", deadline=deadline)
            except Busy:  # of a node that was started a moment ago, and waits for a leader
                if up:
                    raise
                client.connection.retry_seconds = LEADER_SECONDS
                with notice_if_slow(f"waiting for a node that leads, at {client.url} …"):
                    client.connection.ask("GET", "/livez")
                client.connection.retry_seconds = retry_seconds
        client.connection.warn = say
        yield client


@contextmanager
def attached(word: str) -> Iterator[Job]:
    """Find the job that `word` names and keep talking to it while its API restarts."""
    with connected(ATTACHED_SECONDS) as client:
        yield client.job(word)


def complete_jobs(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of the newest jobs that start with `incomplete`, if the API answers."""
    from muster import Client  # noqa: PLC0415  imports httpx

    found = ["@latest"]
    try:
        apply_config_file(os.environ)
        url, ca_file = address_of(find_own_services())
        with Client(
            url, timeout_seconds=_COMPLETION_SECONDS, retry_seconds=0, ca_file=ca_file
        ) as client:
            found += [job.id for job in client.jobs(limit=_COMPLETION_JOBS)]
    except MusterError:
        pass
    return [word for word in found if word.startswith(incomplete)]


_EXACT: Final = "Full id or name, or @latest."
# What cannot be undone is never done to a job that was named by a prefix.

job_argument: Final = click.argument(
    "job", metavar="JOB", shell_complete=complete_jobs, help="Id, prefix, name, or @latest."
)
exact_job_argument: Final = click.argument(
    "job", metavar="JOB", shell_complete=complete_jobs, help=_EXACT
)
exact_jobs_argument: Final = click.argument(
    "jobs", metavar="JOB...", nargs=-1, required=True, shell_complete=complete_jobs, help=_EXACT
)
status_option: Final = click.option(
    "-s",
    "--status",
    type=click.Choice(JobStatus, case_sensitive=False),
    multiple=True,
    metavar="STATUS",
    help="Only jobs with this status; may be repeated.",
)
