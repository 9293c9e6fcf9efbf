"""How many ranks still run, told to whoever waits for services to end: at `down`, and at `up`."""

from collections.abc import Callable
from typing import Final

from cli.elsewhere import ANSWER_SECONDS
from muster.client import Client, ClientError
from muster.client.views import SummaryList
from muster.contracts.errors import MusterError
from muster.contracts.job import OPEN

LOOK_SECONDS: Final = 0.2
MOST: Final = 1000
"""Jobs of one answer."""


def tell_who_remains(
    url: str, ca_file: str | None, has_ended: Callable[[float], bool], tell: Callable[[str], None]
) -> None:
    """Tell how many ranks run, whenever that is another number, until the services have ended.

    `has_ended` waits for that, so many seconds at most, and returns whether they have.
    """
    try:
        client = Client(url, timeout_seconds=ANSWER_SECONDS, retry_seconds=0, ca_file=ca_file)
    except MusterError as error:  # a setting of ours forbids to ask; services end without it
        tell(f"how many ranks still run cannot be told: {error}")
        while not has_ended(LOOK_SECONDS):
            pass
        return
    with client:
        told = ""
        while True:
            line = ranks_left(client)
            if line and line != told:
                tell(line)
                told = line
            if has_ended(LOOK_SECONDS):
                return


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
