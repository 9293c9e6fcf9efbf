"""``muster submit``: a job from a file, from flags, or from a command after ``--``.

A flag goes before the file. Relative paths are those of whoever types the command, so they are
made absolute before the server, which may run elsewhere, reads them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from cli.attached import see_to_the_end
from cli.connected import ATTACHED_SECONDS, connected, path_of
from cli.exit_codes import ExitCode
from cli.output import Output, OutputOption, show
from muster.client.errors import FieldError, Invalid

if TYPE_CHECKING:
    from cli.job_file import JobFile

PATHS: Final = ("dataset_dir", "checkpoint_dir", "working_dir")
COMMAND: Final = "cli.submit.command"


class WithCommand(TyperCommand):
    """A command line of which all after ``--`` is another one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  Typer's own click
        if "--" in args:
            dashes = args.index("--")
            ctx.meta[COMMAND] = args[dashes + 1 :]
            args = args[:dashes]
        return super().parse_args(ctx, args)


File = Annotated[
    Path | None, typer.Argument(metavar="[FILE] [-- COMMAND...]", help="A job in YAML or JSON.")
]
Id = Annotated[str | None, typer.Option("--id", help="Its id. Default: the server makes one.")]
Name = Annotated[str | None, typer.Option("--name", help="A name, for people.")]
Ranks = Annotated[int | None, typer.Option("--ranks", "-n", help="Its world_size.")]
Program = Annotated[
    str | None, typer.Option("--program", help="What to train together: file.py:Name.")
]
Env = Annotated[
    list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="For every rank.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Any field of POST /jobs, as in YAML."),
]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Do not watch it.")]


def submit(  # noqa: PLR0913  each option of a command is a parameter
    context: typer.Context,
    file: File = None,
    *,
    job_id: Id = None,
    name: Name = None,
    ranks: Ranks = None,
    program: Program = None,
    env: Env = None,
    fields: Set = None,
    detach: Detach = False,
    output: OutputOption = Output.NAME,
) -> None:
    """Submit a job, and watch it to its end: Ctrl-C goes away and leaves it running.

    For example: muster submit job.yaml, or muster submit -n 4 -- python train.py

    The job's id goes to standard output, progress to standard error. Exit code
    0 if it completed, 1 if it failed, 8 if it was stopped.
    """
    flags: dict[str, Any] = {
        "job_id": job_id,
        "name": name,
        "world_size": ranks,
        "program": program,
        "command": context.meta.get(COMMAND),
    }
    given = {**{key: said for key, said in flags.items() if said is not None}, **_set(fields or [])}
    described = _read(file)
    body = {**(described.fields if described else {}), **given}
    if env:
        body["env"] = {**(body.get("env") or {}), **dict(_pair("--env", one) for one in env)}
    try:
        with connected() as client:
            job = client.submit(absolute(body, Path.cwd()))
            said = client.connection.get(path_of(job.id)) if output is not Output.NAME else None
    except Invalid as error:
        if not error.errors:
            raise
        for line in sentences(error.errors, described, given):
            typer.echo(line, err=True)
        raise typer.Exit(ExitCode.USAGE) from None
    show(output, said, [f"{job.id} is {job.status}"], [job.id])
    if detach:
        typer.echo(f"its lines: muster logs -f {job.id}", err=True)
        return
    with connected(ATTACHED_SECONDS) as client:
        raise typer.Exit(see_to_the_end(client.job(job.id)))


def absolute(body: Mapping[str, Any], here: Path) -> dict[str, Any]:
    """Return a job whose paths mean the same everywhere.

    What is run by name or by a relative path is run `here`, unless the job says where.
    """
    found = dict(body)
    if found.get("working_dir") is None and (found.get("command") or found.get("program")):
        found["working_dir"] = str(here)
    for field in PATHS:
        if isinstance(found.get(field), str):
            found[field] = os.path.abspath(here / Path(found[field]).expanduser())  # noqa: PTH100  as a shell
    return found


def sentences(
    errors: Sequence[FieldError], described: "JobFile | None", given: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each field that is wrong, with its place if the file has it."""
    for error in errors:
        place = error.loc[1:]
        where = ".".join(str(part) for part in place) or str(error.loc[0])
        hint = f" ({error.hint})" if error.hint else ""
        is_of_file = described is not None and place[:1] and place[0] not in given
        at = described.place(place) if described and is_of_file else "muster"
        yield f"{at}: {where}: {error.msg}{hint}"


def _read(file: Path | None) -> "JobFile | None":
    if file is None:
        return None
    from cli.job_file import InvalidJobFile, JobFile  # noqa: PLC0415  brings in yaml

    try:
        return JobFile.read(file)
    except InvalidJobFile as error:
        # An editor finds the place in a line that begins with it.
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.USAGE) from None


def _set(words: Sequence[str]) -> dict[str, Any]:
    import yaml  # noqa: PLC0415  only where it is asked for

    found = dict(_pair("--set", word) for word in words)
    try:
        return {field: yaml.safe_load(text) for field, text in found.items()}
    except yaml.YAMLError as error:
        raise typer.BadParameter(f"--set: {error}") from None


def _pair(option: str, word: str) -> tuple[str, str]:
    name, equals, text = word.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{option} {word}: write NAME=VALUE")
    return name, text
