"""``muster logs`` and ``events``: what a job's ranks say, and what happened to it."""

from typing import Annotated

import typer

from cli.connected import ATTACHED_SECONDS, Job, connected, path_of
from cli.output import Output, OutputOption, show

Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Go on with what is written, until the job is over.")
]
Rank = Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank's lines.")]
Tail = Annotated[
    int | None,
    typer.Option(
        "--tail", min=0, max=10_000, help="So many last lines first. Default: 200, with -f all."
    ),
]
Last = Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="Most events to show.")]


def logs(job: Job, *, follow: Follow = False, rank: Rank = None, tail: Tail = None) -> None:
    """Show the lines that a job's ranks have written, all of them or one's."""
    with connected() as client:
        found = client.job(job).view
    with connected(ATTACHED_SECONDS) as client:
        for line in client.job_of(found).logs(rank, tail, follow=follow):
            typer.echo(line.line if rank is not None else f"[rank {line.rank}] {line.line}")


def events(job: Job, limit: Last = 1000, output: OutputOption = Output.TABLE) -> None:
    """Show what happened to a job, oldest first."""
    with connected() as client:
        body = client.connection.get(path_of(client.job(job).id, "events"), {"limit": limit})
    said = body["events"]
    lines = (f"{event['at'][:19].replace('T', ' ')}  {event['message']}" for event in said)
    show(output, body, lines, (event["kind"] for event in said))
