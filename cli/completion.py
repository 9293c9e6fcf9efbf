"""``muster completion``: verbs, options, jobs and known words, completed by the shell."""

import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Final

import typer

VARIABLE: Final = "_MUSTER_COMPLETE"
"""By which the shell's script asks."""

TIMEOUT_SECONDS: Final = 1.0
"""A person who has pressed Tab waits no longer."""

SHOWN: Final = 50


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    context: typer.Context, shell: Annotated[Shell, typer.Argument(metavar="SHELL")]
) -> None:
    """Print the script by which a shell completes verbs, options, jobs and known words.

    bash, in ~/.bashrc: source <(muster completion bash)

    zsh, in ~/.zshrc after compinit: source <(muster completion zsh)

    fish: muster completion fish > ~/.config/fish/completions/muster.fish
    """
    from typer.completion import shell_complete  # noqa: PLC0415  --help

    _register_shells()
    root = context.find_root().command
    raise typer.Exit(shell_complete(root, {}, "muster", VARIABLE, f"source_{shell.value}"))


def prepare(environ: Mapping[str, str]) -> None:
    """Let Typer answer, if it is a shell that asks."""
    if VARIABLE in environ:
        _register_shells()


def jobs(incomplete: str) -> Iterator[str]:
    """Yield the ids of the newest jobs that begin like this; none where nobody can be asked."""
    from cli.own_up import own_up, way_to  # noqa: PLC0415  as below
    from cli.preferences import settle  # noqa: PLC0415  --help
    from muster import Client  # noqa: PLC0415  brings in httpx
    from muster.contracts.errors import MusterError  # noqa: PLC0415  as above

    if "@latest".startswith(incomplete):
        yield "@latest"
    try:
        settle(os.environ)
        url, ca_file = way_to(own_up())
        with Client(
            url, timeout_seconds=TIMEOUT_SECONDS, retry_seconds=0, ca_file=ca_file
        ) as client:
            yield from (job.id for job in client.jobs(limit=SHOWN) if job.id.startswith(incomplete))
    except MusterError:
        return


def statuses(incomplete: str) -> list[str]:
    """Return the statuses of jobs that begin like this, written as it is: both are understood."""
    from muster.contracts.job import JobStatus  # noqa: PLC0415  as above

    words = [word.lower() if incomplete.islower() else word.value for word in JobStatus]
    return [word for word in words if word.startswith(incomplete)]


def awaited(incomplete: str) -> list[str]:
    """Return what one can wait for, of what begins like this."""
    return [word for word in ("terminal",) if word.startswith(incomplete)] + statuses(incomplete)


def fields(incomplete: str) -> list[str]:
    """Return the fields of a job that begin like this, ready for their values."""
    from muster.contracts.spec import JobSpec  # noqa: PLC0415  brings in msgspec

    names = ("job_id", *JobSpec.__struct_fields__)
    return [f"{name}=" for name in names if name.startswith(incomplete)]


def _register_shells() -> None:
    """Make Typer know the shells, as it does when it is to install completion itself."""
    from typer.completion import get_completion_inspect_parameters  # noqa: PLC0415  --help

    get_completion_inspect_parameters()
