"""A command's connection to the API, and how a person names a job.

What talks HTTP is imported when a command runs, so that ``--help`` answers at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.completion import jobs, statuses

if TYPE_CHECKING:
    from muster import Client
    from muster.client import Job as JobHeld

PERSON_SECONDS: Final = 2.0
"""How long a command asks again while nobody answers: a person who has forgotten `up` does not
wait for more. One who has not waits as `cli.own_up` says."""

ATTACHED_SECONDS: Final = 60.0
"""Who watches a job has seen the API: it may be replaced meanwhile."""

WHICH: Final = "Its id, the beginning of it, its name, or @latest."

Job = Annotated[str, typer.Argument(help=WHICH, metavar="JOB", autocompletion=jobs)]
Statuses = Annotated[
    list[str] | None,
    typer.Option(
        "--status",
        "-s",
        help="Only jobs with this status; may be repeated.",
        autocompletion=statuses,
    ),
]

IN_FULL: Final = "Its id or name in full, or @latest."
"""What cannot be undone is not done to a job that was guessed."""

NamedJob = Annotated[str, typer.Argument(help=IN_FULL, metavar="JOB", autocompletion=jobs)]
NamedJobs = Annotated[
    list[str], typer.Argument(help=IN_FULL, metavar="JOB...", autocompletion=jobs)
]


@contextmanager
def connected(retry_seconds: float = PERSON_SECONDS) -> Iterator["Client"]:
    """Talk to the API for a while, as soon as it is there if it is just being started again."""
    from cli.own_up import await_restart, own_up, way_to  # noqa: PLC0415
    from muster import Client  # noqa: PLC0415  brings in httpx

    up = own_up()
    if up is not None:
        await_restart(up)
    url, ca_file = way_to(up)
    with Client(url, retry_seconds=retry_seconds, ca_file=ca_file) as client:
        yield client


@contextmanager
def attached(word: str) -> Iterator["JobHeld"]:
    """Hold the job that a person means, and do not let go of it while its API is replaced."""
    # Who waits for an answer to the first question may have forgotten `up`.
    with connected() as client:
        found = client.job(word).view
    with connected(ATTACHED_SECONDS) as client:
        yield client.job_of(found)
