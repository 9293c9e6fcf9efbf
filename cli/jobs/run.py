"""``muster run``: the command line of a job that runs here and now, as torchrun runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from cli.connection import python_option
from muster.contracts.job.field_types import VIRTUAL_SHARDS_OF_SCRIPTS
from muster.contracts.job.problems import checked, checked_job_id
from muster.contracts.job.spec import JobRequest, JobSpec
from muster.contracts.job.status import JobId
from muster.contracts.settings.environ import spec_from_environment
from muster.contracts.settings.names import RANK_DEFAULTS
from muster.host.code import script_of
from muster.host.extras import require_server
from muster.host.gpus import visible_gpus
from muster.host.limits import usable_processors
from muster.host.programs import callers_python, command_problem

TORCHRUN_OPTIONS: Final = re.split(
    " +",
    "--rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --master-addr --master-port --node-rank "
    "--local-addr --log-dir --tee -t --redirects -r --monitor-interval --start-method --role",
)
"""Accepted without effect: on one machine the ranks find each other."""


def parse_ranks(_: click.Context, __: click.Parameter, word: str) -> int:
    """Return a number of ranks from a number, ``cpu``, ``gpu`` or ``auto``."""
    if word.isdecimal() and int(word) > 0:
        return int(word)
    cores, gpus = usable_processors(), visible_gpus(os.environ)
    match word:
        case "cpu":
            return cores
        case "auto":
            return gpus or cores
        case "gpu" if gpus:
            return gpus
        case "gpu":
            raise click.BadParameter("this machine has no GPU: give a number, or cpu")
        case _:
            raise click.BadParameter(f"expected 4, auto, cpu or gpu, got {word!r}")


@click.command(
    context_settings={
        "allow_interspersed_args": False,  # what follows the script belongs to the script
        # torchrun also accepts --nproc_per_node
        "token_normalize_func": lambda option: option.replace("_", "-"),
    }
)
@click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SCRIPT [ARGUMENTS]...",
    help="A Python script and its arguments, or any other command.",
)
@click.option(
    "-n",
    "--nproc-per-node",
    "ranks",
    default="1",
    callback=parse_ranks,
    metavar="N",
    help="Number of ranks: 4, cpu (one for each core that may be used), gpu, or auto (gpu if there "
    "is one).",
)
@click.option(
    "--restart-scope",
    type=click.Choice(["gang", "rank"]),
    default="gang",
    show_default=True,
    help="What is started again when a rank dies: all ranks, or that one.",
)
@click.option(
    "--gang", "restart_scope", flag_value="gang", help="The same as --restart-scope gang."
)
@click.option(
    "--elastic",
    is_flag=True,
    help="For a script with muster.torch: if a rank dies, the others go on, and a new one joins.",
)
@click.option(
    "--peers",
    type=click.IntRange(2, 64),
    metavar="N",
    help="Train together with the same command on other machines of the household, N in all.",
)
@click.option("--group", help="What --peers meets. Default: the name of the script.")
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=JobSpec().max_restarts,
    show_default=True,
    help="Restarts after crashes, and as many after kills: of all ranks, with scope rank of each.",
)
@click.option("--job-id", help="A name, under which to go on after Ctrl-C. Default: a new one.")
@python_option
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
@click.option("--standalone", is_flag=True, hidden=True, help="For torchrun's command lines.")
@click.option("--nnodes", type=int, default=1, hidden=True, help="For torchrun's command lines: 1.")
@click.option(
    *TORCHRUN_OPTIONS, "ignored", multiple=True, hidden=True, help="For torchrun's command lines."
)
@click.pass_context
def run(  # noqa: PLR0913  each option is a parameter
    context: click.Context,
    *,
    words: tuple[str, ...],
    ranks: int,
    restart_scope: Any,  # noqa: ANN401  one of the two literals above
    elastic: bool,
    peers: int | None,
    group: str | None,
    max_restarts: int,
    job_id: str | None,
    python: str | None,
    module: bool,
    standalone: bool,  # noqa: ARG001
    nnodes: int,
    ignored: Sequence[str],  # noqa: ARG001
) -> None:
    """Run a script on several ranks here, like torchrun.

    Needs no server, and runs unmodified torchrun scripts. With --peers it does so on several
    machines, see docs/home.md. Ctrl-C lets the ranks checkpoint and exit, and so does closing
    the terminal. Exit code 0 if the job completed, 1 if it failed, 130 if it was interrupted.
    """
    require_server("run")
    from cli.services.foreground import run_job  # noqa: PLC0415  not needed for --help

    if not words:
        if not os.environ.get("JOB_ID"):
            raise click.UsageError("Missing argument 'SCRIPT [ARGUMENTS]...'.")
        # As `python -m coordinator` by hand: the environment describes the job.
        if ParameterSource.COMMANDLINE in map(context.get_parameter_source, context.params):
            raise click.UsageError(
                "JOB_ID is set and no script is given, so the environment describes the job: "
                "give a script, or leave out the options"
            )
        sys.exit(run_job(checked_job_id(os.environ["JOB_ID"]), spec_from_environment(os.environ)))
    if nnodes != 1:
        raise click.BadParameter("ranks are started on this machine only: leave --nnodes out")
    if "--" in words[1:2] and (module or words[0].endswith(".py")):
        words = (words[0], *words[2:])  # `muster submit` wants it between script and arguments
    python = python or callers_python(os.environ)
    request = JobRequest(
        command=(argv_of_module if module else argv_of_script)(words, Path.cwd(), python),
        python=python,
        world_size=ranks,
        restart_scope="rank" if elastic else restart_scope,
        mode="synchronous" if elastic else "independent",
        virtual_shards=VIRTUAL_SHARDS_OF_SCRIPTS if elastic else JobSpec().virtual_shards,
        max_restarts=max_restarts,
        max_kills=max_restarts,  # torchrun counts a kill as a failure like any other
        env={name: os.environ[name] for name in RANK_DEFAULTS if name in os.environ},
    )
    job = new_job_id() if job_id is None else checked_job_id(job_id)
    if peers or group:
        if not (peers and elastic):
            raise click.UsageError("--group needs --peers, and --peers needs --elastic.")
        from cli.jobs.peers import run_with_peers  # noqa: PLC0415  as above

        sys.exit(run_with_peers(peers, group, words[0], job, checked(request.spec())))
    if ranks > 1 and restart_scope == "gang" and not elastic:
        from cli.jobs.submit import has_separate_models, text_of  # noqa: PLC0415  as above

        if has_separate_models(text_of(script_of(request.command, None, ""))):
            click.echo(
                "note: unless it uses torch.distributed, each rank trains its own model: choose "
                "--restart-scope rank, as a gang resumes only from a checkpoint of all its ranks",
                err=True,
            )
    sys.exit(run_job(job, checked(request.spec())))


def argv_of_script(words: Sequence[str], directory: Path, python: str) -> tuple[str, ...]:
    """Return the argv of every rank: the interpreter with a script, or any other command."""
    command = (python, *words) if words[0].endswith(".py") else tuple(words)
    if problem := command_problem(command, directory, os.environ.get("PATH")):
        raise click.BadParameter(problem)
    return command


def argv_of_module(words: Sequence[str], directory: Path, python: str) -> tuple[str, ...]:
    """Return the argv of every rank: the interpreter with a module."""
    # Only the package is looked for: where its parts are is known once it is imported.
    package, _, _ = words[0].partition(".")
    code = "import importlib.util, sys; sys.exit(not importlib.util.find_spec(sys.argv[1]))"
    asked = [python, "-c", code, package]
    if subprocess.run(asked, cwd=directory, check=False).returncode:  # noqa: S603
        raise click.BadParameter(f"there is no module {package} in {directory} or {python}")
    return (python, "-m", *words)


def new_job_id() -> JobId:
    """Return an id that no job has."""
    return JobId(f"run-{datetime.now(UTC):%Y%m%dt%H%M%S}-{os.urandom(3).hex()}")
