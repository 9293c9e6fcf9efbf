"""``muster dataset``: create a data set to train on."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cli.output import ShellPath
from muster.contracts.location import parse_location

if TYPE_CHECKING:
    from muster.datasets.schema import Contents

SHARDS_MAX: Final = 99_999
"""A shard's name has five digits: with more, sorted order would not be the order of creation."""

SAMPLES_PER_UPDATE: Final = 10_000


@click.group()
def dataset() -> None:
    """Create a data set to train on."""


def _number(name: str, default: int, low: int, high: int, text: str) -> Callable[[Any], Any]:
    return click.option(name, type=click.IntRange(low, high), default=default, help=text)


_out = click.option(
    "--out", type=ShellPath(path_type=str), required=True, help="Directory or s3://bucket/prefix."
)
_shards = _number("--shards", 8, 1, SHARDS_MAX, "Number of files.")
_seed = _number("--seed", 0, 0, 2**63 - 1, "The same seed gives the same bytes.")
_if_missing = click.option(
    "--if-missing", is_flag=True, help="Succeed without writing if a data set is there."
)
_force = click.option("--force", is_flag=True, help="Replace the data set that is there.")


@dataset.command()
@_out
@_shards
@_seed
@_if_missing
@_force
def digits(*, out: str, shards: int, seed: int, if_missing: bool, force: bool) -> None:
    """Write the UCI handwritten digits.

    1438 to train on, and 359 held out in test.jsonl.
    """
    from muster.datasets.synthetic import digits as handwritten_digits  # noqa: PLC0415  slow

    contents = handwritten_digits(shards=shards, seed=seed)
    _write(out, contents, if_missing=if_missing, force=force)


@dataset.command()
@_out
@_number("--samples", 2048, 1, 10**10, "Number of lines.")
@_shards
@_number("--features", 16, 1, 4096, "Numbers per sample.")
@_number("--classes", 4, 2, 256, "Number of labels.")
@_seed
@_if_missing
@_force
def synthetic(*, out: str, if_missing: bool, force: bool, **sizes: int) -> None:
    """Write points scattered around one centre per class.

    Any amount, and learnable.
    """
    from muster.datasets.synthetic import synthetic as scattered_points  # noqa: PLC0415  slow

    _write(out, scattered_points(**sizes), if_missing=if_missing, force=force)


def _write(out: str, contents: Contents, *, if_missing: bool, force: bool) -> None:
    from muster.datasets.errors import DatasetExists  # noqa: PLC0415  slow
    from muster.datasets.writer import upload_dataset, write_dataset  # noqa: PLC0415  slow
    from muster.objects.client import default_client  # noqa: PLC0415  slow

    location = parse_location(out)
    facts = contents.facts
    if facts.shards > facts.samples:
        raise click.BadParameter(
            f"{facts.shards} is more than the {facts.samples} samples", param_hint="'--shards'"
        )
    try:
        with click.progressbar(
            contents.lines,
            facts.samples,
            hidden=not sys.stderr.isatty(),
            file=sys.stderr,
            update_min_steps=SAMPLES_PER_UPDATE,
        ) as lines:
            contents = contents._replace(lines=lines)
            if isinstance(location, Path):
                write_dataset(location, contents, replace=force)
            else:
                upload_dataset(location, default_client(), contents, replace=force)
            lines.finish()  # the writer does not ask for a line after the last
            lines.render_progress()
    except DatasetExists:
        if not if_missing:
            raise
        click.echo(f"{out} holds a data set already: nothing was written")
        return
    held_out = f", {facts.held_out} more in test.jsonl" if facts.held_out else ""
    found = location.absolute() if isinstance(location, Path) else location
    click.echo(
        f"Wrote {facts.samples} samples in {facts.shards} shards to {out}{held_out}. "
        f"Next: muster submit -n 2 --set dataset_dir={shlex.quote(str(found))}"
    )
