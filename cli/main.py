"""``muster``: the table of commands, and the entry point that runs one of them."""

import io
import json
import os
import shlex
import sys
import traceback
from importlib import import_module
from typing import Any, Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from cli.errors import ExitCode, exit_code_of
from cli.output import Output, output_option, show
from muster.contracts.errors import InvalidEnvironment, MusterError, printable
from muster.contracts.interpreter import VERSION
from muster.runtime.stderr_messages import print_stderr


class Entry(NamedTuple):
    """The module below ``cli`` of a command, and the first line of its help.

    ``module:function`` where the function has another name than the command.
    """

    home: str
    help: str


HEADINGS: Final = {
    "Services": {
        "up": Entry("services.up", "Run the API and the coordinator on this machine."),
        "down": Entry("services.up", "Stop the services; every rank saves first."),
        "status": Entry("services.status", "Show what runs, and whether it is healthy."),
        "open": Entry(
            "services.status:open_page", "Print the address of the web page, and open it."
        ),
        "doctor": Entry("checks.doctor", "Check this installation and suggest repairs."),
        "cluster": Entry("cluster", "Check a cluster file."),
        "engines": Entry("cluster", "Show what may start ranks, and what is missing."),
        "hosts": Entry("cluster", "Show the hosts on which ranks may run, and what runs there."),
        "config": Entry("config", "Show every setting and its origin."),
        "backup": Entry("services.up", "Copy the database, and list the files that belong to it."),
        "token": Entry("services.token", "Create, list and revoke API tokens."),
        "secret": Entry("secret", "Store secrets that jobs may use."),
    },
    "Jobs": {
        "submit": Entry("jobs.submit", "Submit a job and watch it until it ends."),
        "plan": Entry("cluster", "Show on which nodes the ranks of a job would run."),
        "run": Entry("jobs.run", "Run a script on several ranks here, like torchrun."),
        "check": Entry("checks.check", "Check that a script has the same bits at every size."),
        "ps": Entry("jobs.show", "List jobs, newest first."),
        "leaderboard": Entry("jobs.leaderboard", "Compare the jobs of a sweep, and name the best."),
        "top": Entry("jobs.show", "Watch all jobs live."),
        "show": Entry("jobs.show:show_job", "Show one job and each of its ranks."),
        "series": Entry("jobs.series", "Show loss, throughput and metrics of a job by step."),
        "logs": Entry("jobs.show", "Show what the ranks of a job have printed."),
        "events": Entry("jobs.show", "Show what happened to a job, and why."),
        "wait": Entry("jobs.lifecycle", "Wait until a job ends."),
        "scale": Entry("jobs.lifecycle", "Change the number of ranks of a job."),
        "pause": Entry("jobs.lifecycle", "Pause a job; its ranks stay."),
        "resume": Entry("jobs.lifecycle", "Resume a paused job."),
        "stop": Entry("jobs.lifecycle", "Save a last checkpoint and stop jobs."),
        "rm": Entry("jobs.lifecycle", "Delete jobs that have ended, with their logs."),
        "purge": Entry("jobs.lifecycle", "Delete every job that matches a filter."),
        "gc": Entry("jobs.lifecycle", "List what deleted jobs have left, and delete it."),
    },
    "Inside a job": {
        "workers": Entry("jobs.workers", "List the workers of a job's pool."),
        "attempts": Entry("jobs.workers", "List the processes of a job and how each ended."),
        "audit": Entry("jobs.workers", "Check that every sample was read exactly once."),
        "chaos": Entry("checks.chaos", "Kill one rank and watch the job recover."),
    },
    "At home": {
        "node": Entry("node", "Make this machine a node of its household, until Ctrl-C."),
        "mesh": Entry("mesh", "Show who leads this household, and its nodes and links."),
    },
    "Data": {
        "dataset": Entry("data.dataset", "Create a data set to train on."),
        "checkpoint": Entry(
            "data.checkpoints", "Save, list, verify, compare and export checkpoints."
        ),
        "digest": Entry("data.checkpoints", "Print the SHA-256 of a job's newest state."),
    },
    "Tools": {
        "demo": Entry("checks.demo", "Kill ranks while a model trains; the bits stay the same."),
        "schema": Entry("main", "Print the JSON schema of a job file."),
        "completion": Entry("main", "Print a shell's completion script."),
        "version": Entry("main", "Show the version."),
    },
}

COMMANDS: Final = {name: entry for group in HEADINGS.values() for name, entry in group.items()}

ALIASES: Final = {"validate": "doctor", "ls": "ps"}
"""Other names of a command, which help does not list."""

OTHER_TOOLS: Final = {
    **dict.fromkeys(["list", "jobs", "squeue"], "ps"),
    **dict.fromkeys(["cancel", "kill", "scancel"], "stop"),
    **dict.fromkeys(["delete", "remove"], "rm"),
    "sbatch": "submit",
    "torchrun": "run",
    "tail": "logs",
    "describe": "show",
    "start": "up",
}
"""What other tools call a command: suggestions, as ours may differ in detail."""


class LazyGroup(click.Group):
    """A group that imports a command when it is used: help and completion read the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        entry = COMMANDS.get(name := ALIASES.get(cmd_name, cmd_name))
        if entry is None:
            return None
        module, _, function = entry.home.partition(":")
        command: click.Command = getattr(import_module(f"cli.{module}"), function or name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if ours := OTHER_TOOLS.get(args[0]):
            ctx.fail(f"No such command {args[0]!r}. Try muster {ours}.")
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            name = error.command_name
            raise click.exceptions.NoSuchCommand(name, possibilities=COMMANDS, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, COMMANDS))
        for heading, entries in HEADINGS.items():
            with formatter.section(heading):
                rows = [(f"{name:<{width}}", entry.help) for name, entry in entries.items()]
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = (name for name in COMMANDS if name.startswith(incomplete))
        items = [CompletionItem(name, help=COMMANDS[name].help) for name in names]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  as click declares it
        """Run a command; an error becomes a message and an exit code."""
        from cli.config import apply_config_file  # noqa: PLC0415  not needed for --help

        try:
            apply_config_file(os.environ)
            return super().invoke(ctx)
        except (KeyboardInterrupt, click.Abort):
            raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None
        except (click.ClickException, click.exceptions.Exit, BrokenPipeError):
            raise  # click has its own way to end for these
        except Exception as error:
            if ctx.params["debug"]:
                traceback.print_exc()
            print_stderr(f"muster: {printable(_message_of(error))}")
            raise click.exceptions.Exit(exit_code_of(error)) from error


def _message_of(error: Exception) -> str:
    match error:
        case InvalidEnvironment():
            from cli.config import with_origin  # noqa: PLC0415  not needed for --help

            return str(with_origin(error, os.environ))
        case MusterError() | UnicodeError():
            return str(error)
        case FileNotFoundError(filename=None):  # as of getcwd
            return f"{error.strerror}: if the current directory was deleted, change to another"
        case OSError():
            return str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        case _:
            again = shlex.join(["muster", "--debug", *sys.argv[1:]])
            kind = type(error).__name__
            return f"internal error: {kind}: {error}; see the traceback with: {again}"


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog="To begin: muster up -d, then muster submit -- python train.py",
)
@click.version_option(VERSION, "--version", message="muster %(version)s")
@click.option(
    "--debug", is_flag=True, help="Print the traceback of an error; write it before the command."
)
def app(*, debug: bool) -> None:
    """A fault-tolerant, elastic runtime for distributed training."""


@click.command()
@output_option
def version(output: Output) -> None:
    """Show the version."""
    show(output, {"version": VERSION}, [f"muster {VERSION}"], [VERSION])


@click.command()
def schema() -> None:
    """Print the JSON schema of a job file.

    Editors complete and check a job file that begins with the line
    # yaml-language-server: $schema=job.schema.json
    after: muster schema > job.schema.json
    """
    click.echo(json.dumps(job_schema(), indent=2, ensure_ascii=False))


def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job file."""
    import msgspec  # noqa: PLC0415  not needed for --help

    from muster.contracts.job.spec import JobRequest  # noqa: PLC0415  as above

    parts = msgspec.json.schema(JobRequest)["$defs"]
    return {
        **parts.pop(JobRequest.__name__),
        "$defs": parts,
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job of Muster",
        "description": "As muster submit reads it: relative paths, and ~, are those of the user "
        "who submits it.",
    }


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a shell's completion script.

    bash, in ~/.bashrc: source <(muster completion bash)

    zsh, in ~/.zshrc after compinit: source <(muster completion zsh)

    fish: muster completion fish > ~/.config/fish/completions/muster.fish
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415  not needed for --help

    script = get_completion_class(shell)
    assert script is not None, shell  # noqa: S101  click knows all three
    root = context.find_root().command
    click.echo(script(root, {}, "muster", "_MUSTER_COMPLETE").source())


def main() -> None:
    """Run the command that the arguments of this process name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal without UTF-8
    app(prog_name="muster")
