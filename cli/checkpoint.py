"""``muster checkpoint``: look at what a job has saved, without disturbing it."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.exit_codes import ExitCode
from cli.held import Held, Rank, Where, Which, checkpoint_named
from cli.output import Output, OutputOption, show
from cli.tables import table
from muster.checkpoints.errors import CheckpointMissing

if TYPE_CHECKING:
    from muster.checkpoints.comparison import Difference
    from muster.checkpoints.shelves import Found, Shelf

_HEADER: Final = ("whose", "step", "epoch", "size", "saved at (UTC)", "age", "state")
_DIFFERENCES_HEADER: Final = ("name", "first", "second", "elements", "largest")

app = typer.Typer(
    help="Checkpoints: list, verify, compare and export them. They are read from the disk, so "
    "this is to be run where they lie.",
    no_args_is_help=True,
)


@app.command()
def ls(where: Where, output: OutputOption = Output.TABLE) -> None:
    """List a job's checkpoints, the current one first.

    Each is read to its last byte. States: current (a restart goes on from it),
    intact, damaged, or another job's that had the same directory. With -o name
    their paths, as show takes them.
    """
    from cli.checkpoint_rows import entry, row  # noqa: PLC0415  brings in numpy

    found = _examined(Held.by(where))
    show(
        output,
        [entry(shelf, one) for shelf, one in found],
        table(_HEADER, [row(shelf, one) for shelf, one in found]),
        (_path(shelf, one) for shelf, one in found),
    )


@app.command("show")
def show_one(which: Which, rank: Rank = None, output: OutputOption = Output.TABLE) -> None:
    """Show what a checkpoint holds.

    These are its facts, its values, and its arrays with their sha256.
    """
    from cli.checkpoint_rows import document, lines_of  # noqa: PLC0415  as above

    checkpoint = checkpoint_named(which, rank)
    body = document(checkpoint)
    show(output, body, lines_of(body), (array["name"] for array in body["arrays"]))


@app.command()
def verify(where: Where, output: OutputOption = Output.TABLE) -> None:
    """Look for damage in a job's checkpoints.

    Every byte is read and held against what was saved. Exit code 1 if a file is
    damaged, or LATEST leads nowhere; it is named. With -o name these are the paths
    of the checkpoints that are damaged, and of such a LATEST.
    """
    from cli.checkpoint_rows import entry  # noqa: PLC0415  brings in numpy

    held = Held.by(where)
    found, strays = _examined(held), dict(_strays(held))
    lines = (
        f"{shelf.whose}  step {it.name.step}  {it.damage or it.condition}" for shelf, it in found
    )
    damaged = [one for _, one in found if one.damage]
    show(
        output,
        {"checkpoints": [entry(shelf, one) for shelf, one in found], "strays": [*strays.values()]},
        chain(lines, strays.values()),
        chain((_path(shelf, one) for shelf, one in found if one.damage), strays),
    )
    if damaged or strays:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def diff(
    first: Which, second: Which, rank: Rank = None, output: OutputOption = Output.TABLE
) -> None:
    """Compare two checkpoints bit by bit. Exit code 1 if anything differs.

    For example: muster checkpoint diff my-job:40 my-job:45
    """
    import msgspec  # noqa: PLC0415  --help

    from muster.checkpoints.comparison import differences  # noqa: PLC0415  brings in numpy

    states = []
    for which in (first, second):
        checkpoint = checkpoint_named(which, rank)
        position = msgspec.to_builtins(checkpoint.position)
        states.append({**checkpoint.state, **{f"position.{at}": n for at, n in position.items()}})
    found = differences(*states)
    body = {"equal": not found, "differences": msgspec.to_builtins(found)}
    show(output, body, _comparison(found, len(states[0])), (one.name for one in found))
    if found:
        raise typer.Exit(ExitCode.FAILED)


@app.command()
def export(
    which: Which,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A new .npz file, or a new directory.")
    ],
    rank: Rank = None,
) -> None:
    """Write a checkpoint's arrays for other programs.

    They go to one .npz, or to a directory of .npy. What is no array (values,
    position) goes to checkpoint.json in the directory.
    """
    from muster.checkpoints.export import ARCHIVE  # noqa: PLC0415  brings in numpy
    from muster.checkpoints.export import export as write  # noqa: PLC0415  as above

    if target.suffix not in ("", ARCHIVE):  # who writes .pt does not mean a directory
        raise typer.BadParameter(
            f"{target.suffix} is no format of ours: name a new {ARCHIVE} file, or a new directory, "
            "which gets a .npy for each array",
            param_hint="TARGET",
        )
    checkpoint = checkpoint_named(which, rank)
    count = write(checkpoint, target)
    arrays = "1 array" if count == 1 else f"{count} arrays"
    kind = "file" if target.suffix else "directory"
    typer.echo(f"the {kind} {target} holds {arrays} of step {checkpoint.step}", err=True)


def digest(where: Where, output: OutputOption = Output.TABLE) -> None:
    """Verify the newest checkpoint of every rank and print the sha256 of its state.

    Equal digests mean equal bits: weights, optimizer state and position in the data.
    """
    from cli.digest import digests_on  # noqa: PLC0415  --help

    found = list(digests_on(Held.by(where).shelves))
    show(
        output,
        [{"whose": whose, "step": step, "sha256": sha256} for whose, step, sha256 in found],
        (f"{whose}  step {step}  sha256 {sha256}" for whose, step, sha256 in found),
        (sha256 for _, _, sha256 in found),
    )


def _examined(held: Held) -> "list[tuple[Shelf, Found]]":
    from muster.checkpoints.shelves import examine  # noqa: PLC0415  --help

    found = [(shelf, one) for shelf in held.shelves for one in examine(shelf)]
    if not found:
        raise CheckpointMissing(f"{held.directory} holds no checkpoint yet")
    return found


def _path(shelf: "Shelf", one: "Found") -> str:
    return f"{shelf.reader.directory}/{one.name}"


def _strays(held: Held) -> Iterator[tuple[str, str]]:
    """Yield each LATEST that leads nowhere, and a sentence on it.

    A restart goes by what is there, yet something was lost.
    """
    for shelf in held.shelves:
        latest, names = shelf.reader.latest(), shelf.reader.names()
        # A job that goes on has replaced it meanwhile, if it is another now.
        if names and latest not in names and shelf.reader.latest() == latest:
            lack = (
                "is missing or cannot be read" if latest is None else f"names {latest}, not there"
            )
            path = f"{shelf.reader.directory}/LATEST"
            yield path, f"{shelf.whose}  {path} {lack}"


def _comparison(found: "list[Difference]", count: int) -> Iterator[str]:
    if not found:
        yield f"equal bits: {count} entries, position included"
        return
    yield from table(_DIFFERENCES_HEADER, map(_difference_row, found))


def _difference_row(one: "Difference") -> tuple[str | int | None, ...]:
    largest = None if one.largest is None else f"{one.largest:.3g}"
    return (one.name, one.first, one.second, one.elements, largest)
