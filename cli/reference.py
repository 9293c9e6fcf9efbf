"""What the command line says about itself: version, schema, completion, and the reference pages.

``python -P -m cli.reference`` writes ``docs/reference/``.
"""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Final

import click

from cli.output import Output, output_option, show

DIRECTORY: Final = Path(__file__).parent.parent / "docs" / "reference"


@click.command()
@output_option
def version(output: Output) -> None:
    """Show the version."""
    number = installed_version("muster-train")
    show(output, {"version": number}, [f"muster {number}"], [number])


@click.command()
def schema() -> None:
    """Print the JSON schema of a job file.

    Editors complete and check a job file that begins with the line
    # yaml-language-server: $schema=job.schema.json
    after: muster schema > job.schema.json
    """
    from muster.contracts.job_fields import job_schema  # noqa: PLC0415

    click.echo(json.dumps(job_schema(), indent=2, ensure_ascii=False))


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


def cli_page() -> str:
    """Return the Markdown page of all commands, made from their help."""
    from cli.errors import __doc__ as exit_codes  # noqa: PLC0415  only here
    from cli.main import ALIASES, HEADINGS, app  # noqa: PLC0415  as above

    root = app.make_context("muster", [], resilient_parsing=True, terminal_width=80)
    aliases = ", ".join(f"`{alias}` is `{name}`" for alias, name in ALIASES.items())
    codes = "\n".join(line for line in (exit_codes or "").splitlines()[2:] if line)
    parts = [
        "# Command line\n\nMade by `python -P -m cli.reference`.",
        f"```\n{root.get_help()}\n```",
        f"Aliases: {aliases}.",
        f"## Exit codes\n\n```\n{codes}\n```",
    ]
    for heading, entries in HEADINGS.items():
        parts.append(f"## {heading}")
        for name in entries:
            parts += _sections(app, root, name, "###")
    return "\n\n".join(parts) + "\n"


def _sections(group: click.Group, parent: click.Context, name: str, level: str) -> Iterator[str]:
    """Yield the help of a command and of those below it."""
    command = group.get_command(parent, name)
    assert command is not None, name  # noqa: S101  it was listed
    context = click.Context(command, parent=parent, info_name=name, terminal_width=80)
    yield f"{level} {context.command_path}\n\n```\n{context.get_help()}\n```"
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            yield from _sections(command, context, below, f"{level}#")


def main() -> None:
    """Write the reference pages."""
    DIRECTORY.mkdir(exist_ok=True)
    from cli.config import reference_page as configuration_page  # noqa: PLC0415  only here
    from muster.contracts.job_fields import reference_page as job_fields_page  # noqa: PLC0415

    pages = {"cli": cli_page, "configuration": configuration_page, "job-fields": job_fields_page}
    for name, page in pages.items():
        (DIRECTORY / f"{name}.md").write_text(page())
        click.echo(f"wrote {DIRECTORY / name}.md", file=sys.stderr)


if __name__ == "__main__":
    main()
