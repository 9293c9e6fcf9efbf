"""``muster dataset``: make a data set to train on.

Everything of ours is imported inside the commands, so that ``--help`` answers at once.
"""

import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from muster.datasets.contents import Contents

MOST_SHARDS: Final = 99_999
"""Five digits in a shard's name: with more of them, sorted order is not the order made."""

SAMPLES_PER_REPORT: Final = 10_000

app = typer.Typer(help="Make a data set to train on.", no_args_is_help=True)

Out = Annotated[Path, typer.Option("--out", help="The directory to write; made if need be.")]
Shards = Annotated[int, typer.Option("--shards", min=1, max=MOST_SHARDS, help="Number of files.")]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="The same seed gives the same bytes.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the data set that is there.")]
Samples = Annotated[int, typer.Option("--samples", min=1, max=10**10, help="Number of lines.")]
Features = Annotated[int, typer.Option("--features", min=1, max=4096, help="Numbers per sample.")]
Classes = Annotated[int, typer.Option("--classes", min=2, max=256, help="Number of labels.")]


@app.command()
def digits(*, out: Out, shards: Shards = 8, seed: Seed = 0, force: Force = False) -> None:
    """Write the UCI handwritten digits.

    1438 are to train on, 359 are held out in test.jsonl.
    """
    from muster.datasets.digits import digits as handwritten_digits  # noqa: PLC0415  --help

    with _errors_as_sentences():
        _write(out, handwritten_digits(shards=shards, seed=seed), force=force)


@app.command()
def synthetic(
    *,
    out: Out,
    samples: Samples = 2048,
    shards: Shards = 8,
    features: Features = 16,
    classes: Classes = 4,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Write points scattered around one centre per class.

    Any amount, and learnable.
    """
    from muster.datasets.synthetic import synthetic as scattered_points  # noqa: PLC0415  --help

    contents = scattered_points(
        samples=samples, shards=shards, features=features, classes=classes, seed=seed
    )
    with _errors_as_sentences():
        _write(out, contents, force=force)


def _write(out: Path, contents: "Contents", *, force: bool) -> None:
    from muster.datasets.writer import replace_dataset, write_dataset  # noqa: PLC0415  --help

    facts = contents.facts
    if facts.shards > facts.samples:
        raise typer.BadParameter(
            f"{facts.shards} is more than the {facts.samples} samples", param_hint="'--shards'"
        )
    write = replace_dataset if force else write_dataset
    write(out, contents._replace(lines=_reported(contents.lines, facts.samples)))
    held_out = f", {facts.held_out} more in test.jsonl" if facts.held_out else ""
    typer.echo(
        f"Wrote {facts.samples} samples in {facts.shards} shards to {out}{held_out}. "
        f"Next: muster submit -n 2 --set dataset_dir={shlex.quote(str(out.absolute()))}"
    )


def _reported(lines: Iterable[bytes], total: int) -> Iterator[bytes]:
    """Pass `lines` on; on a terminal, say now and then how far along they are."""
    report = sys.stderr.isatty() and total > SAMPLES_PER_REPORT
    for number, line in enumerate(lines, start=1):
        # Before the line is handed over: nobody comes back for more after the last one.
        if report and (number % SAMPLES_PER_REPORT == 0 or number == total):
            end = "\n" if number == total else ""
            typer.echo(f"\r{number} of {total} samples{end}", nl=False, err=True)
        yield line


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    from muster.contracts.errors import MusterError  # noqa: PLC0415  --help

    try:
        yield
    except MusterError as error:
        typer.echo(f"muster: {error}", err=True)
        raise typer.Exit(1) from error
