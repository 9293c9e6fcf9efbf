"""``muster check``: the first steps of a script at several sizes, with a kill and a resume.

Every step is saved in a temporary directory, so the first one that differs can be named. The
script ends with its loop: what follows it, such as an export, does not run.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from cli.connection import python_option
from cli.errors import ExitCode
from cli.jobs.run import argv_of_module, argv_of_script
from cli.output import notice_if_slow, plural
from cli.services.signals import interrupt_at_signals
from cli.services.up import temporary_services
from muster.contracts.errors import MusterError, printable
from muster.contracts.job.field_types import VIRTUAL_SHARDS_OF_SCRIPTS
from muster.contracts.job.status import JobStatus
from muster.contracts.settings.names import CHECK, CHECK_KILLS, CHECK_STEPS, RANK_DEFAULTS
from muster.contracts.settings.paths import checkpoints_of_job
from muster.host.extras import require_server
from muster.host.programs import callers_python

if TYPE_CHECKING:
    from muster.checkpoints.comparison import Difference
    from muster.checkpoints.reader import Checkpoint
    from muster.client import Client

STEPS: Final = 3
NAMES_SHOWN: Final = 5
LAST_LINES: Final = 10

IMPURE: Final = (
    "the body of the loop may use only the state and its batch; docs/pytorch.md names what breaks "
    "that"
)
UNSEEDED: Final = (
    "no two starts agree after step 1: the script makes other weights or data each time. Call "
    "torch.manual_seed(0) before it makes them"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """One job of a check."""

    job_id: str
    what: str
    ranks: int
    steps: int
    resume_from: str | None = None
    environ: dict[str, str] = field(default_factory=dict)


def _parts(sizes: Sequence[int], steps: int) -> Iterator[_Part]:
    for size in sizes:
        yield _Part(f"size-{size}", plural(size, "rank"), size, steps)
    largest = max(sizes)
    ranks = plural(largest, "rank")
    if largest > 1:
        what = f"{ranks}, one of them killed in step 2"
        yield _Part("killed", what, largest, steps, environ={CHECK_KILLS: "1"})
    yield _Part("first-half", f"{ranks}, ended after step {steps - 1}", largest, steps - 1)
    yield _Part("resumed", f"{ranks}, resumed from there", largest, steps, "first-half")


def _sizes(_: click.Context, __: click.Parameter, words: str) -> list[int]:
    sizes = [int(word) for word in words.split(",") if word.strip().isdecimal()]
    if len(sizes) != words.count(",") + 1 or min(sizes) < 1:
        raise click.BadParameter(f"expected numbers of ranks such as 1,2,3, got {words!r}")
    return sizes


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument(
    "words",
    nargs=-1,
    required=True,
    type=click.UNPROCESSED,
    metavar="SCRIPT [ARGUMENTS]...",
    help="A Python script with muster.torch, and its arguments.",
)
@click.option("-n", "sizes", default="1,2,3", callback=_sizes, show_default=True, metavar="N,N...")
@click.option(
    "--steps", type=click.IntRange(min=2), default=STEPS, show_default=True, help="Steps of each."
)
@python_option
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as with python -m.")
def check(
    *, words: tuple[str, ...], sizes: list[int], steps: int, python: str | None, module: bool
) -> None:
    """Check that a script has the same bits at every size.

    Runs its first steps with each number of ranks, with a kill and with a resume, and names
    the first step that differs. What follows the loop does not run, the total number of steps
    stays, and checkpoints are temporary. MUSTER_CHECK=1 is set for hooks that write files.
    Exit code 1 if a step differs or the script fails.
    """
    require_server("check")
    from muster.checkpoints.comparison import identity_of  # noqa: PLC0415  not for --help

    python = python or callers_python(os.environ)
    command = (argv_of_module if module else argv_of_script)(words, Path.cwd(), python)
    failed = False
    interrupt_at_signals()
    with tempfile.TemporaryDirectory(prefix="muster-check-") as made:
        stage = Path(made)
        with temporary_services(stage, max(sizes)) as client:
            reference, firsts = None, []
            for part in _parts(sizes, steps):
                began = time.monotonic()
                with notice_if_slow(part.what):
                    _run(client, stage, part, command)
                saved = _saved(stage, part)
                found = _first_difference(reference or saved, saved)
                said = found or ("the same bits" if reference else plural(steps, "step"))
                click.echo(f"{part.what}: {said} ({time.monotonic() - began:.0f} s)")
                reference = reference or saved
                firsts += [identity_of(saved[1])] if part.resume_from is None else []
                failed |= bool(found)
    if failed:
        # Two of these runs have the same number of ranks.
        is_unseeded = len({*firsts}) == len(firsts)
        click.echo(UNSEEDED if is_unseeded else IMPURE, err=True)
        sys.exit(ExitCode.FAILED)
    click.echo(f"{plural(steps, 'step')} had the same bits in every run")


def _run(client: Client, stage: Path, part: _Part, command: Sequence[str]) -> None:
    """Run one job to its end; raises `MusterError` if it fails."""
    body: dict[str, Any] = {
        "job_id": part.job_id,
        "command": command,
        "python": command[0],
        "mode": "synchronous",
        "virtual_shards": VIRTUAL_SHARDS_OF_SCRIPTS,
        "working_dir": str(Path.cwd()),
        "world_size": part.ranks,
        "min_workers": part.ranks,
        "spare_ranks": 0,  # each would load torch, too, for a job of a few steps
        "checkpoint_dir": str(stage / "checkpoints"),
        "checkpoint_every": 1,
        "keep_last": part.steps + 1,
        "resume_from": part.resume_from,
        "stop_grace_seconds": 5,  # an interrupted check keeps nothing
        "env": {
            **{name: os.environ[name] for name in RANK_DEFAULTS if name in os.environ},
            CHECK: "1",
            CHECK_STEPS: str(part.steps),
            **part.environ,
        },
    }
    job = client.submit(body)
    if (ended := job.wait().view).status != JobStatus.COMPLETED:
        lines = [f"  {line.line}" for line in job.logs(tail=LAST_LINES)]
        message = f"{part.what}: the job is {ended.status}: {ended.message}"
        raise MusterError("\n".join(printable(text) for text in [message, *lines]))


def _saved(stage: Path, part: _Part) -> dict[int, Checkpoint]:
    """Return the checkpoint of each step."""
    from muster.checkpoints.listing import checkpoint_dirs  # noqa: PLC0415  not for --help

    place = checkpoints_of_job(stage / "checkpoints", part.job_id)
    (directory,) = checkpoint_dirs(place)
    first = 1 if part.resume_from is None else part.steps
    return {step: directory.of_step(step) for step in range(first, part.steps + 1)}


def _first_difference(one: dict[int, Checkpoint], other: dict[int, Checkpoint]) -> str:
    """Return where the second run begins to differ, "" if it does not."""
    from muster.checkpoints.comparison import differences, identity_of  # noqa: PLC0415

    for step in sorted(one.keys() & other.keys()):
        if identity_of(one[step]) != identity_of(other[step]):
            found = differences(one[step].state, other[step].state)
            return f"differs from step {step} on: {_names(found)}"
    return ""


def _names(found: Sequence[Difference]) -> str:
    names = [difference.name for difference in found] or ["the samples that were read"]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
