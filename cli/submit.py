"""``muster submit``: a job from a file, from flags, or from a command after ``--``."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from cli import completion
from cli.attached import see_to_the_end
from cli.connected import ATTACHED_SECONDS, connected
from cli.description import SUFFIXES, Description
from cli.exit_codes import ExitCode
from cli.output import Output, show
from cli.plan import show_plan
from cli.typed_command import mistyped
from cli.waits import said_if_it_lasts
from muster.client.errors import Invalid
from muster.contracts.printable import spelt_out

if TYPE_CHECKING:
    from cli.job_file import JobFile

COMMAND: Final = "cli.submit.command"


class WithCommand(TyperCommand):
    """A command line of which all after ``--`` is another one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  Typer's own click
        typed = list(args)
        if "--" in args:
            dashes = args.index("--")
            ctx.meta[COMMAND] = args[dashes + 1 :]
            args = args[:dashes]
        begin = None if ctx.resilient_parsing else self._begin_of_command(ctx, args)
        if begin is not None:
            meant = shlex.join(["muster", "submit", *typed[:begin], "--", *typed[begin:]])
            ctx.fail(f"write -- before the command: {meant}")
        return super().parse_args(ctx, args)

    def _begin_of_command(self, context: Any, words: list[str]) -> int | None:  # noqa: ANN401
        """Return where a command begins that has no dashes before it; None if there is none.

        Raises what Typer does if options before it are none of ours.
        """
        parser = self.make_parser(context)
        parser.allow_interspersed_args = False
        given, after, _ = parser.parse_args(list(words))
        if not given["file"] or Path(given["file"]).suffix in SUFFIXES:
            return None
        try:
            _, strange, _ = self.make_parser(context).parse_args(list(words))
        except TyperException:
            strange = after
        return len(words) - len(after) - 1 if strange else None


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
Secrets = Annotated[
    list[str] | None,
    typer.Option(
        "--secret",
        metavar="NAME=REFERENCE",
        help="A variable for every rank, from file:NAME (muster secret) or env:NAME of the server.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any field of a job, as in job.yaml.",
        autocompletion=completion.fields,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check it and say its plan, no more.")]
HowToShow = Annotated[
    Output | None,
    typer.Option("--output", "-o", help="How to show it. Default: its id, or the plan."),
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
    secrets: Secrets = None,
    fields: Set = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    output: HowToShow = None,
) -> None:
    """Submit a job, and watch it to its end: Ctrl-C goes away and leaves it running.

    For example: muster submit job.yaml, or muster submit -n 4 -- python train.py

    The job's id goes to standard output, progress to standard error. Exit code
    0 if it completed, 1 if it failed, 8 if it was stopped.
    """
    flags = {
        "job_id": job_id,
        "name": name,
        "world_size": ranks,
        "program": program,
        "command": context.meta.get(COMMAND),
    }
    typed = {field: value for field, value in flags.items() if value is not None}
    described = Description(
        file=_read(file),
        typed={**typed, **_values(fields or [])},
        mappings={
            "env": _pairs("--env", env or []),
            "secrets": _pairs(
                "--secret", secrets or [], "NAME=REFERENCE, such as HF_TOKEN=file:hf-token"
            ),
        },
    )
    asked = described.body(Path.cwd())
    _refuse_mistyped(context.meta.get(COMMAND), asked.get("working_dir"))
    if dry_run:
        with connected() as client, _telling_places(described):
            show_plan(client.plan(asked), asked, output or Output.TABLE)
        return
    from muster.client.views import JobView  # noqa: PLC0415  --help

    with connected() as client:
        client.connection.get("/livez")  # who has forgotten `up` waits no longer to hear of it
    with connected(ATTACHED_SECONDS) as client:
        with (
            _telling_places(described),
            said_if_it_lasts(
                "the API has not answered yet; should it be away, it is asked again for a minute …"
            ),
        ):
            answer = client.order(asked)
        job = client.job_of(answer.read_as(JobView))
        show(output or Output.NAME, answer.read_as(object), [f"{job.id} is {job.status}"], [job.id])
        if job.view.message:
            typer.echo(spelt_out(f"note: {job.view.message}"), err=True)
        code = ExitCode.OK if detach else see_to_the_end(job)
    if code is not ExitCode.INTERRUPTED:  # who goes away is told more
        follow = "-f " if detach else ""
        typer.echo(f"its lines: muster logs {follow}{job.id}", err=True)
    raise typer.Exit(code)


def _read(file: Path | None) -> "JobFile | None":
    if file is None:
        return None
    from cli.job_file import InvalidJobFile, JobFile  # noqa: PLC0415  brings in yaml

    try:
        return JobFile.read(file)
    except InvalidJobFile as error:
        _refuse([str(error)])


@contextmanager
def _telling_places(described: Description) -> Iterator[None]:
    """End the command where the API refuses a field, and say which and where it was written."""
    try:
        yield
    except Invalid as error:
        _refuse([*described.sentences(error.errors)] or [str(error)])


def _refuse_mistyped(command: Sequence[str] | None, place: object) -> None:
    problem = mistyped(command, Path(place)) if command and isinstance(place, str) else None
    if problem:
        _refuse([f"muster: {problem}"])


def _refuse(lines: Sequence[str]) -> NoReturn:
    """Say what is wrong; an editor finds the place in a line that begins with it."""
    for line in lines:
        typer.echo(spelt_out(line), err=True)
    raise typer.Exit(ExitCode.USAGE) from None


def _values(words: Sequence[str]) -> dict[str, Any]:
    """Return what ``--set`` says, each value as YAML reads it."""
    import yaml  # noqa: PLC0415  only where it is asked for

    from cli.yaml_problem import yaml_problem  # noqa: PLC0415  as above
    from muster.plain_yaml import plain  # noqa: PLC0415  as above

    loader = plain(yaml.SafeLoader)
    found = {}
    for field, text in _pairs("--set", words, "FIELD=VALUE").items():
        try:
            found[field] = yaml.load(text, loader)  # noqa: S506  it is a safe one
        except Exception as error:
            problem = f"{text!r} is no YAML: {yaml_problem(error)}"
            raise typer.BadParameter(f"--set {field}: {problem}") from error
    return found


def _pairs(option: str, words: Sequence[str], wanted: str = "NAME=VALUE") -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{option} {word}: write {wanted}")
        found[name] = text
    return found
