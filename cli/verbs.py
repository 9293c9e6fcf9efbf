"""Every verb: where it is, under which heading ``muster --help`` names it, and in which words.

A table, so that help, completion and a suggestion for a misspelt verb import none of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import typer

from cli.plain_words import read_plainly
from cli.usage import name_plainly


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One word that a person can say."""

    home: str
    """The function or the Typer app with words of its own, as ``module:name``."""
    help: str
    """Short enough for one line of 80 columns."""
    command: str = "typer.core:TyperCommand"
    """The kind of command it becomes."""
    context: str | None = None
    """The settings by which its words are read, where that is not as usual."""

    def load(self, name: str) -> Any:  # noqa: ANN401  Typer's own click
        """Return the command itself, under this name."""
        shelf = typer.Typer(rich_markup_mode=None)
        found = _resolve(self.home)
        if isinstance(found, typer.Typer):
            shelf.add_typer(found, name=name)
        else:
            settings = _resolve(self.context) if self.context else None
            shelf.command(name, cls=_resolve(self.command), context_settings=settings)(found)
        loaded: Any = typer.main.get_group(shelf).commands[name]
        read_plainly(loaded)
        name_plainly(loaded)
        return loaded


def _resolve(home: str) -> Any:  # noqa: ANN401  whatever is there
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)


HEADINGS: Final[Mapping[str, Mapping[str, Verb]]] = {
    "Services": {
        "up": Verb(home="cli.heavy:up", help="Run the API and the coordinator here."),
        "down": Verb(home="cli.heavy:down", help="End them; every rank saves first."),
        "status": Verb(home="cli.heavy:status", help="Show what runs, and whether all is well."),
        "validate": Verb(
            home="cli.heavy:validate", help="Check this installation; say what to mend."
        ),
        "config": Verb(home="cli.config:app", help="Show every setting, and where it is from."),
        "token": Verb(home="cli.token:app", help="Let others in, and shut them out again."),
        "secret": Verb(home="cli.secret:app", help="Keep what jobs may use and nobody sees."),
    },
    "Jobs": {
        "submit": Verb(
            home="cli.submit:submit",
            help="Submit a job, and watch it to its end.",
            command="cli.submit:WithCommand",
        ),
        "run": Verb(
            home="cli.run:run",
            help="Run a script here and now, as torchrun does.",
            context="cli.run:AS_TORCHRUN",
        ),
        "ps": Verb(home="cli.jobs:ps", help="List jobs, the newest first."),
        "top": Verb(home="cli.top:top", help="Watch all jobs, live."),
        "show": Verb(home="cli.jobs:show_job", help="Show one job and each of its ranks."),
        "logs": Verb(home="cli.story:logs", help="Show what its ranks have written."),
        "events": Verb(home="cli.story:events", help="Show what happened to it, and why."),
        "wait": Verb(home="cli.ending:wait", help="Wait until it is over."),
        "scale": Verb(home="cli.pool:scale", help="Give it another number of ranks."),
        "pause": Verb(home="cli.pool:pause", help="Let it take no further step; ranks stay."),
        "resume": Verb(home="cli.pool:resume", help="Let it go on."),
        "stop": Verb(home="cli.ending:stop", help="Let it save a last checkpoint and end."),
        "rm": Verb(home="cli.ending:rm", help="Delete what is over, with its logs."),
        "purge": Verb(home="cli.purge:purge", help="Delete every job that matches."),
    },
    "Inside a job": {
        "workers": Verb(home="cli.pool:workers", help="Show who is and was in its pool."),
        "incarnations": Verb(
            home="cli.incarnations:incarnations", help="Show every process and how it ended."
        ),
        "audit": Verb(home="cli.pool:audit", help="Show whether every sample was read once."),
        "chaos": Verb(home="cli.chaos:chaos", help="Kill one rank, and see the job recover."),
    },
    "Data": {
        "dataset": Verb(home="cli.dataset:app", help="Make a data set to train on."),
        "checkpoint": Verb(
            home="cli.checkpoint:app", help="Look at checkpoints, verify and export."
        ),
        "digest": Verb(
            home="cli.checkpoint:digest", help="Print the sha256 of a job's newest state."
        ),
    },
    "Tools": {
        "demo": Verb(home="cli.heavy:demo", help="See ranks die while the bits stay the same."),
        "schema": Verb(home="cli.schema:schema", help="Print the JSON schema of job.yaml."),
        "completion": Verb(
            home="cli.completion:completion", help="Let bash, zsh or fish complete all this."
        ),
        "version": Verb(home="cli.version:version", help="Show the version."),
    },
}

ALIASES: Final[Mapping[str, str]] = {"doctor": "validate", "ls": "ps"}
"""Other words for a verb, which help does not name."""

SAID_ELSEWHERE: Final[Mapping[str, str]] = {
    "help": "--help, or muster VERB --help",
    "list": "ps",
    "jobs": "ps",
    "get": "ps",
    "squeue": "ps",
    "sbatch": "submit",
    "torchrun": "run",
    "delete": "rm",
    "remove": "rm",
    "cancel": "stop",
    "kill": "stop",
    "scancel": "stop",
    "describe": "show",
    "tail": "logs",
    "attach": "wait",
    "sinfo": "status",
    "serve": "up",
    "server": "up",
    "start": "up",
    "restart": "down, then muster up; of a job, muster submit --set resume_from=JOB",
}
"""What other tools call it: whoever says that is told ours, as it may not do quite the same."""

VARIABLES: Final[Mapping[str, str]] = {
    "--port": "MUSTER_PORT",
    "--host": "MUSTER_HOST",
    "--data-dir": "MUSTER_DATA_DIR",
    "--url": "MUSTER_URL",
    "--token": "MUSTER_TOKEN",
}
"""What other tools take as options: what is the same in every terminal is no verb's own."""

VERBS: Final[Mapping[str, Verb]] = {
    name: verb for verbs in HEADINGS.values() for name, verb in verbs.items()
}
