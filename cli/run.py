"""``muster run``: one job in the foreground, with no server, as torchrun has it.

What the service does is done here as well, by the same coordinator over a database of its own.
Ranks print on standard output, what happens to them is told on standard error.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.accelerators import visible_gpus
from cli.outlet import Outlet
from cli.relay import Relay
from muster.contracts.environ import UNLESS_SET, ServiceSettings
from muster.contracts.job import JobId
from muster.contracts.layout import JobFiles
from muster.contracts.spec import JobSpec, RestartScope
from muster.contracts.spec_problems import checked, checked_job_id
from muster.remarks import remark

if TYPE_CHECKING:
    from store.records import Event, Job, Worker

_DEFAULT: Final = JobSpec()

UNTOLD: Final = frozenset({"submitted", "rank_started", "rank_exited", "job_failing"})
"""Events of every job. Why a rank is gone that is started again is told with the job's status."""

OWN_WORDS: Final[Mapping[str, str]] = {
    "job_stopping": "interrupted; ranks are saving and exiting",
    "job_queued": "",
}
"""Of events that speak of a service: here is none, and what goes on is told in the end."""

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT [ARGUMENTS]...",
        help="A Python script and its arguments, or any other command.",
        show_default=False,
    ),
]


def ranks_named(word: str | int) -> int:
    """Return how many ranks a number is, or a word of torchrun's; raises `BadParameter`."""
    if str(word).isdecimal() and int(word) > 0:
        return int(word)
    cores, accelerators = os.cpu_count() or 1, visible_gpus(os.environ)
    match word:
        case "cpu":
            return cores
        case "auto":
            return accelerators or cores
        case "gpu" if accelerators:
            return accelerators
        case "gpu":
            raise typer.BadParameter("there is no GPU here: say a number, or cpu")
        case _:
            raise typer.BadParameter(f"{word!r} is no number of ranks: say 4, auto, cpu or gpu")


Ranks = Annotated[
    int,
    typer.Option(
        "-n",
        "--nproc-per-node",
        parser=ranks_named,
        metavar="N",
        help="Number of ranks: 4, cpu (one for each core), gpu, or auto (gpu if there is one).",
    ),
]
Scope = Annotated[
    RestartScope,
    typer.Option(help="What is started again when a rank dies: all ranks, or that one."),
]
Module = Annotated[
    bool, typer.Option("-m", "--module", help="SCRIPT is a module, as of python -m.")
]
Standalone = Annotated[
    bool, typer.Option("--standalone", help="For torchrun's sake: it is always so.", hidden=True)
]
Nodes = Annotated[int, typer.Option("--nnodes", help="For torchrun's sake: 1.", hidden=True)]
Unneeded = Annotated[
    list[str] | None,
    typer.Option(
        "--rdzv-backend",
        "--rdzv-endpoint",
        "--rdzv-id",
        "--rdzv-conf",
        "--master-addr",
        "--master-port",
        "--node-rank",
        "--local-addr",
        "--log-dir",
        "--tee",
        "-t",
        "--redirects",
        "-r",
        "--monitor-interval",
        "--start-method",
        "--role",
        help="For torchrun's sake: on one machine ranks find each other by themselves.",
        hidden=True,
    ),
]
Restarts = Annotated[int, typer.Option(min=0, help="Restarts of one rank after crashes.")]
Id = Annotated[
    str | None,
    typer.Option(
        "--job-id", help="A name, to go on under after Ctrl-C.", show_default="made for you"
    ),
]


def as_torchrun_spells_it(option: str) -> str:
    """Return the option's own name: torchrun takes ``--nproc_per_node`` for it as well."""
    return option.replace("_", "-")


AS_TORCHRUN: Final[Mapping[str, Any]] = {
    "allow_interspersed_args": False,  # what comes after the script is the script's
    "token_normalize_func": as_torchrun_spells_it,
}


def run(  # noqa: PLR0913  each option of a command is a parameter
    words: Words,
    ranks: Ranks = 1,
    restart_scope: Scope = "gang",
    max_restarts: Restarts = _DEFAULT.max_restarts,
    job_id: Id = None,
    *,
    module: Module = False,
    standalone: Standalone = True,  # noqa: ARG001  whether or not it is said
    nodes: Nodes = 1,
    unneeded: Unneeded = None,  # noqa: ARG001  whatever they say
) -> None:
    """Run a script on several ranks here and now, with no server; an unmodified torchrun script.

    Ctrl-C lets the ranks save and exit, and so does closing the terminal. The exit code is 0 if
    the job was completed, 1 if it failed, 130 if it was interrupted.
    """
    import logging  # noqa: PLC0415

    from coordinator.foreground import play  # noqa: PLC0415
    from muster import journal  # noqa: PLC0415

    if nodes != 1:
        raise typer.BadParameter("ranks are started on this machine alone: leave --nnodes out")
    spec = JobSpec(
        command=module_of(words, Path.cwd()) if module else command_of(words, Path.cwd()),
        world_size=ranks,
        restart_scope=restart_scope,
        max_restarts=max_restarts,
        env=set_by_caller(os.environ),
    )
    settings = ServiceSettings.read(os.environ, cores=os.cpu_count() or 1)
    journal.configure("muster", logging.WARNING)  # the rest is told in words
    chosen = new_id() if job_id is None else checked_job_id(job_id)
    raise typer.Exit(play(chosen, checked(spec), settings, os.environ, _Terminal))


def command_of(words: Sequence[str], directory: Path) -> tuple[str, ...]:
    """Return the argv of every rank: this Python runs a script, any other command is its own.

    Raises `BadParameter` for a script that is not there.
    """
    if not words[0].endswith(".py"):
        return tuple(words)
    if not (directory / words[0]).is_file():
        raise typer.BadParameter(f"there is no script {words[0]} in {directory}")
    return (sys.executable, *words)


def module_of(words: Sequence[str], directory: Path) -> tuple[str, ...]:
    """Return the argv of every rank that runs a module of this Python.

    Raises `BadParameter` for one that is not there. Of a package's parts only it knows where they
    are, once it is imported.
    """
    package, _, _ = words[0].partition(".")
    places = [str(directory), *sys.path]
    if not any(finder.find_spec(package, places) for finder in sys.meta_path):
        raise typer.BadParameter(f"there is no module {package} in {directory} or this Python")
    return (sys.executable, "-m", *words)


def set_by_caller(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of the caller's environment is to hold although we have defaults for it."""
    return {name: environ[name] for name in UNLESS_SET if name in environ}


def new_id() -> JobId:
    """Return an id that nobody has chosen."""
    return JobId(f"run-{datetime.now(UTC):%Y%m%dt%H%M%S}-{os.urandom(3).hex()}")


class _Terminal:
    """Shows what ranks print, and what happens to them."""

    def __init__(self, files: JobFiles) -> None:
        self._files = files
        self._relay = Relay(files.logs, Outlet(sys.stdout, _say).say)

    def look(self) -> None:
        self._relay.pass_on()

    def see_rest(self) -> None:
        self._relay.finish()

    def miss_rest(self) -> None:
        _say("nobody reads what ranks print: what was not shown is in their logs alone")

    def hear(self, event: "Event") -> None:
        sentence = OWN_WORDS.get(event.kind, event.message)
        if sentence and event.kind not in UNTOLD:
            _say(sentence)

    def note(self, workers: "Sequence[Worker]") -> None:
        """Ranks print how far they are, if they want to."""

    def conclude(self, job: "Job") -> None:
        _say(f"logs: {self._files.logs}")
        if not job.is_terminal:
            _say(f"interrupted; the same command with --job-id {job.job_id} goes on")


def _say(sentence: str) -> None:
    remark(f"muster: {sentence}")
