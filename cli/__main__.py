"""``muster``: the words a person can say. Each command imports what it needs when it is called."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Final

import typer

from cli import checkpoint, dataset, ending, jobs, pool, story, token
from cli.chaos import chaos
from cli.exit_codes import ExitCode, code_of_error
from cli.incarnations import incarnations
from cli.run import run
from cli.submit import WithCommand, submit
from cli.top import top
from muster.contracts.environ import ServiceSettings
from muster.contracts.errors import MusterError

app = typer.Typer(
    name="muster",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(dataset.app, name="dataset")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(token.app, name="token")


def _show_version(wanted: bool) -> None:  # noqa: FBT001  Typer's way
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415

        typer.echo(f"muster {version('muster-train')}")
        raise typer.Exit


@app.callback()
def muster(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """A fault-tolerant, elastic runtime for distributed training."""


@app.command()
def up() -> None:
    """Run the API and the coordinator here, until Ctrl-C. Either is restarted whenever it dies."""
    from cli.up import serve  # noqa: PLC0415

    raise typer.Exit(serve(_settings(), os.environ))


@app.command()
def demo() -> None:
    """Train one model while ranks come, die and go; compare the bits with a run of one rank."""
    from cli.demo import show  # noqa: PLC0415

    raise typer.Exit(show(_settings(), os.environ))


_VERBS: Final[Mapping[str, Callable[..., None]]] = {
    "ps": jobs.ps,
    "top": top,
    "show": jobs.show_job,
    "logs": story.logs,
    "events": story.events,
    "wait": ending.wait,
    "stop": ending.stop,
    "rm": ending.rm,
    "purge": ending.purge,
    "scale": pool.scale,
    "pause": pool.pause,
    "resume": pool.resume,
    "workers": pool.workers,
    "audit": pool.audit,
    "incarnations": incarnations,
    "chaos": chaos,
    "digest": checkpoint.digest,
}
app.command("submit", cls=WithCommand)(submit)
for name, verb in _VERBS.items():
    app.command(name)(verb)
app.command("ls", hidden=True)(jobs.ps)

# What comes after the script is the script's.
app.command(context_settings={"allow_interspersed_args": False})(run)


def _settings() -> ServiceSettings:
    return ServiceSettings.read(os.environ, cores=os.cpu_count() or 1)


def main() -> None:
    """Run a command; an error of ours is a sentence and an exit code."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except MusterError as error:
        typer.echo(f"muster: {error}", err=True)
        sys.exit(code_of_error(error))


if __name__ == "__main__":
    main()
