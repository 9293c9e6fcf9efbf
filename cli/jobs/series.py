"""``muster series``: what a job has reported by step and time."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from cli.connection import connected, job_argument
from cli.errors import ExitCode, Misuse
from cli.output import Cell, Output, ShellPath, show, table
from muster.contracts.errors import printable
from muster.contracts.series import POINTS_LIMIT
from muster.contracts.views.history import SeriesColumns, SeriesList

HEADER: Final = ("name", "step", "first", "least", "greatest", "last", "values", "not finite")

EXPORTED: Final = ".muster"
"""Ends the names of files for TensorBoard; a further export replaces them."""


@click.command()
@job_argument
@click.argument("names", nargs=-1, metavar="[NAME]...", help="Only these. Default: all.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    help="table: one line per series; csv: one per point. Default: table.",
)
@click.option(
    "--to",
    "target",
    type=(click.Choice(["tensorboard"]), ShellPath(file_okay=False, path_type=Path)),
    metavar="tensorboard DIR",
    help="Write the run DIR/JOB for TensorBoard, without what was abandoned.",
)
def series(job: str, names: Sequence[str], output: str, target: tuple[str, Path] | None) -> None:
    """Show loss, throughput and metrics of a job by step.

    A point sums up many steps if there are many. If training went back to an earlier step, the
    points beyond it are abandoned.
    """
    with connected() as client:
        found = client.job(job).series(*names, points=POINTS_LIMIT)
    if missing := sorted(set(names) - set(found.series)):
        known = ", ".join(found.names) or "none yet"
        why = f"muster: {found.job_id} has no series {missing[0]!r}; it has: {known}"
        click.echo(printable(why), err=True)
        sys.exit(ExitCode.NOT_FOUND)
    if target is not None:
        click.echo(write_events(found, target[1]), err=True)
    elif output == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows(csv_rows(found))
    else:
        rows = [_row(name, curve.live) for name, curve in sorted(found.series.items())]
        show(Output(output), msgspec.to_builtins(found), table(HEADER, rows), ())


def _row(name: str, live: SeriesColumns) -> tuple[Cell, ...]:
    known = [at for at, count in enumerate(live.count) if count]
    values: list[str | None] = [None] * 4
    if known:
        least = min(live.least[at] or 0.0 for at in known)
        greatest = max(live.greatest[at] or 0.0 for at in known)
        ends = live.first[known[0]], least, greatest, live.last[known[-1]]
        values = [f"{value:.6g}" for value in ends]
    last_step = live.step[-1] if live.step else None
    return (name, last_step, *values, sum(live.count), sum(live.not_finite))


def csv_rows(found: SeriesList) -> Iterator[Sequence[Any]]:
    """Yield a header, and a row for each point; an unknown value is empty."""
    yield "name", "is_abandoned", *SeriesColumns.__struct_fields__
    for name, curve in sorted(found.series.items()):
        for is_abandoned, columns in enumerate([curve.live, curve.abandoned]):
            for point in zip(*msgspec.structs.astuple(columns), strict=True):
                yield name, is_abandoned, *point


def write_events(found: SeriesList, directory: Path) -> str:
    """Write the live points as one run of TensorBoard; return where they are."""
    try:
        from tensorboardX import SummaryWriter  # noqa: PLC0415  optional
    except ImportError:
        raise Misuse(
            "tensorboardX is not installed beside muster. Install it: "
            f"{sys.executable} -m pip install tensorboardX"
        ) from None
    place = directory / found.job_id
    for path in place.glob(f"events.out.tfevents.*{EXPORTED}"):
        path.unlink(missing_ok=True)
    writer = SummaryWriter(str(place), filename_suffix=EXPORTED)
    began = found.began_at.timestamp()
    for name, curve in sorted(found.series.items()):
        live = curve.live
        tags = {name: live.last}
        if any(count > 1 for count in live.count):
            tags |= {f"{name}/least": live.least, f"{name}/greatest": live.greatest}
        for tag, values in tags.items():
            for step, seconds, value in zip(live.step, live.seconds, values, strict=True):
                if value is not None:
                    writer.add_scalar(tag, value, step, began + seconds)
    writer.close()
    return f"wrote {place}: tensorboard --logdir {directory}"
