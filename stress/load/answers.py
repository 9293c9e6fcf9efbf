"""Accepted jobs per second, and the time to list jobs among many.

``python -m stress.load.answers`` starts services, measures them from this process and prints the
figures with their goals. Other load on the machine makes them worse.
"""

from pathlib import Path

from stress.load.figures import report_of
from stress.load.lists import list_figures
from stress.load.submissions import postgres_figures, sqlite_figures
from stress.runner import Report, main


def run(directory: Path, *, seconds: float = 15.0, jobs: int = 10_000) -> Report:
    """Submit for so many seconds, and list so many finished jobs."""
    return report_of(
        [
            *sqlite_figures(directory / "sqlite", seconds),
            *postgres_figures(directory / "postgres", seconds),
            *list_figures(directory / "lists", jobs),
        ]
    )


if __name__ == "__main__":
    main(run)
