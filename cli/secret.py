"""``muster secret``: what jobs may use."""

from __future__ import annotations

import sys
from typing import Any, Final

import click
import msgspec

from cli.node import ask_leader
from cli.output import Group, Output, output_option, show
from cli.services.record import service_settings
from muster.contracts.errors import MusterError
from muster.contracts.settings.paths import DataDir
from muster.runtime.secrets import SecretStore

_secret_name: Final = click.argument("name", metavar="NAME", help="What jobs call it: file:NAME.")


@click.group(cls=Group)
def secret() -> None:
    """Store secrets that jobs may use.

    They are files in the data directory; on a node, in that of the node that leads. No command
    shows one again, and none needs the services.
    """


@secret.command("set")
@_secret_name
def set_secret(name: str) -> None:
    """Store a secret, typed or from standard input.

    For example: muster secret set hf-token < token.txt
    """
    if sys.stdin.isatty():
        question = f"value of {name} (it is not shown)"
        text = click.prompt(question, hide_input=True, confirmation_prompt="again", err=True)
    else:
        text = sys.stdin.buffer.read().decode(errors="surrogateescape")
    secrets = _secrets()
    secrets.put(name, str(text))
    click.echo(f"kept {secrets.place}; in a job: --secret VARIABLE=file:{name}", err=True)


@secret.command("ls")
@output_option
def list_secrets(*, output: Output) -> None:
    """List the names of all secrets."""
    secrets = _secrets()
    names = secrets.names()
    show(output, names, names, names)
    click.echo(f"these are {secrets.place}", err=True)


@secret.command("rm")
@_secret_name
def remove_secret(name: str) -> None:
    """Remove a secret.

    Running ranks keep it. A rank that starts again cannot, and its job fails.
    """
    _secrets().remove(name)
    click.echo(f"{name} is removed", err=True)


class _LeaderSecrets:
    """A `SecretStore` without `read`, on the node that leads. All raise `MusterError`."""

    place = "by the node that leads, with copies on those that may lead later"

    def put(self, name: str, text: str) -> None:
        self._ask(name=name, text=text.encode(errors="surrogateescape"))

    def names(self) -> list[str]:
        return self._ask()

    def remove(self, name: str) -> None:
        self._ask(name=name)

    def _ask(self, **call: Any) -> list[str]:  # noqa: ANN401  the fields of a SecretCall
        from cli.services.cluster_secrets import (  # noqa: PLC0415  needs zeroconf
            SECRETS,
            SecretAnswer,
            SecretCall,
        )

        asked = msgspec.json.encode(SecretCall(**call))
        answer = msgspec.json.decode(ask_leader(SECRETS, asked), type=SecretAnswer)
        if answer.problem:
            raise MusterError(answer.problem)
        return [*answer.names]


def _secrets() -> SecretStore | _LeaderSecrets:
    files = DataDir(service_settings().data_dir)
    if files.cluster_record.exists():
        from muster.mesh.founding import read_cluster  # noqa: PLC0415  as above

        if read_cluster(files.cluster_record) is not None:
            return _LeaderSecrets()
    return SecretStore(files.secrets)
