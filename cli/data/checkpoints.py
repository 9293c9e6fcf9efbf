"""``muster checkpoint`` and ``digest``: look at saved checkpoints without disturbing a job.

They are read from the disk. Where a directory is named, no service has to run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from cli.connection import attached, complete_jobs, connected, job_argument
from cli.errors import ExitCode, Misuse
from cli.jobs.lifecycle import delete_checkpoints, watch_to_end
from cli.output import (
    Column,
    Group,
    Output,
    ShellPath,
    columns,
    facts,
    moment,
    output_option,
    plural,
    show,
)
from muster.checkpoints.errors import CheckpointMissing
from muster.checkpoints.manifest import CheckpointName
from muster.client.progress import duration
from muster.contracts.job.field_types import StepChoice
from muster.contracts.location import Location, parse_location
from muster.contracts.settings.paths import checkpoints_of_job, size_text

if TYPE_CHECKING:
    from muster.checkpoints.listing import CheckpointDir, ListedCheckpoint
    from muster.checkpoints.reader import Checkpoint

# Numpy is imported inside the functions: `--help` does not need it.

_Function = TypeVar("_Function", bound=Callable[..., Any])

_CHECKPOINTS: Final[Mapping[str, Column]] = {
    "whose": "whose",
    "step": "step",
    "epoch": "epoch",
    "size": lambda entry: entry["saved_at"] and size_text(entry["size_bytes"]),
    "saved at (UTC)": lambda entry: entry["saved_at"] and moment(entry["saved_at"]),
    "age": lambda entry: (
        (at := entry["saved_at"])
        and duration((datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds())
    ),
    "state": lambda entry: entry["state"] + ", best" * entry["is_best"],
}
_DIFFERENCES: Final[Mapping[str, Column]] = {
    "name": "name",
    "first": lambda one: _cut(one["first"]),
    "second": lambda one: _cut(one["second"]),
    "elements": "elements",
    "largest": lambda one: None if one["largest"] is None else f"{one['largest']:.3g}",
}
_ARRAYS: Final[Mapping[str, Column]] = {
    "array": "name",
    "dtype": "dtype",
    "shape": lambda array: "x".join(map(str, array["shape"])) or "scalar",
    "bytes": "size_bytes",
    "sha256": lambda array: f"{array['sha256'][:16]}…",  # enough to tell two apart
}

_CELL_LIMIT: Final = 40
"""Most characters of a value in a table of differences; -o json prints all of it."""

_WITH_STEP: Final = re.compile(r"(.+):(\d+|best)", re.DOTALL)
_PLACE: Final = "A job, or a directory: a word with a slash, such as ./checkpoints/my-job"


def find_checkpoint(word: str, rank: int | None) -> Checkpoint:
    """Return a verified checkpoint; raises a `MusterError`.

    `word` is ``WHERE``, ``WHERE:STEP``, ``WHERE:best``, or the directory of one checkpoint.
    """
    where, step, name = _parts(word)
    place = _checkpoint_dir(where, rank)
    if name is not None:
        return place.reader.load(name)
    return place.newest() if step is None else place.of_step(step)


def _parts(word: str) -> tuple[str, StepChoice | None, CheckpointName | None]:
    """Return a place, and the step or the checkpoint in it that `word` names."""
    location = parse_location(word)
    if _is_location(word) and (name := CheckpointName.parse(location.name)):
        return f"{location.parent}/", None, name
    found = _WITH_STEP.fullmatch(word)
    if found is None or (isinstance(location, Path) and location.is_dir()):
        return word, None, None
    return found[1], "best" if found[2] == "best" else int(found[2]), None


def _ranks(word: str) -> list[int | None]:
    """Return the ranks that have checkpoints of their own, None if `word` is one checkpoint."""
    where, _, name = _parts(word)
    return [None] if name else [place.rank for place in _checkpoint_dirs(where)[1]]


def _checkpoint_dir(word: str, rank: int | None) -> CheckpointDir:
    location, found = _checkpoint_dirs(word)
    ranks = [place.rank for place in found]
    if rank is None and len(ranks) > 1:
        raise Misuse(
            f"in {location} each of the ranks {ranks[0]} to {ranks[-1]} has its own checkpoints: "
            "choose one with --rank"
        )
    if rank is not None and rank not in ranks:
        known = ", ".join(map(str, ranks))
        raise CheckpointMissing(f"{location} has checkpoints of rank {known} only")
    return found[0 if rank is None else ranks.index(rank)]


def _checkpoint_dirs(word: str) -> tuple[Location, Sequence[CheckpointDir]]:
    """Return a job's place and its checkpoints, by rank."""
    from muster.checkpoints.listing import checkpoint_dirs  # noqa: PLC0415
    from muster.objects.client import BRIEF_RETRY_SECONDS, S3Client  # noqa: PLC0415

    location, uid = (parse_location(word), None) if _is_location(word) else _place_of_job(word)
    S3Client.retry_seconds = BRIEF_RETRY_SECONDS  # a person waits
    return location, checkpoint_dirs(location, uid)


def _is_location(word: str) -> bool:
    return "/" in word or word in {".", ".."}


def _place_of_job(word: str) -> tuple[Location, str]:
    with connected() as client:
        job = client.job(word).view
    location = checkpoints_of_job(parse_location(job.spec["checkpoint_dir"]), job.job_id)
    if isinstance(location, Path) and not location.is_dir():
        reason = "it has saved none yet, or it saves on another machine"
        if job.spec["command"]:
            reason += "; a command saves only with `import muster`"
        raise CheckpointMissing(f"{job.job_id} has no checkpoints in {location}: {reason}")
    return location, job.job_uid


def _examined(
    location: Location, places: Sequence[CheckpointDir], last: int | None = None
) -> list[tuple[CheckpointDir, ListedCheckpoint]]:
    """Return every checkpoint, or the `last` ones of each place, after reading all their bytes."""
    from muster.checkpoints.listing import examine  # noqa: PLC0415

    counts = (len(place.reader.store.names()) for place in places)
    each = ((place, one) for place in places for one in islice(examine(place), last))
    length, hidden = sum(min(count, last or count) for count in counts), not sys.stderr.isatty()
    with click.progressbar(each, length, "reading", hidden=hidden, file=sys.stderr) as examined:
        found = [*examined]
    if not found:
        raise CheckpointMissing(f"{location} has no checkpoint yet")
    return found


_where_argument = click.argument(
    "where", metavar="WHERE", shell_complete=complete_jobs, help=f"{_PLACE}."
)
_rank_option = click.option(
    "--rank", type=click.IntRange(min=0), help="The rank, if each has its own checkpoints."
)


def _which_argument(name: str) -> Callable[[_Function], _Function]:
    text = f"{_PLACE}, or what ls -o name prints; STEP may be best. Without: the current one."
    return click.argument(name, metavar="WHERE[:STEP]", shell_complete=complete_jobs, help=text)


@click.group(cls=Group)
def checkpoint() -> None:
    """Save, list, verify, compare and export checkpoints.

    Except for now, they read files: run them on the machine that has these.
    """


@checkpoint.command()
@job_argument
@click.option("--timeout", type=click.FloatRange(min=0), help="Seconds to wait. Default: no limit.")
@click.option("--no-wait", is_flag=True, help="Do not wait until it is durable.")
def now(job: str, timeout: float | None, *, no_wait: bool) -> None:
    """Save a checkpoint of a running job, and print its step.

    The job has to be synchronous; it goes on training. Exit code 7 if the
    timeout expired: the checkpoint is saved as soon as all ranks are ready.
    """
    with attached(job) as found:
        found.checkpoint()
        if no_wait:
            click.echo(f"{found.id} will save a checkpoint; see: muster events {found.id}")
            return
        code = watch_to_end(found, lambda: found.wait("checkpoint", timeout, progress=True))
        told = [event for event in found.events() if event.kind.startswith("checkpoint_")][-1:]
        for event in told:
            if event.kind == "checkpoint_saved":  # else the job has ended before
                click.echo(f"{found.id}: {event.message}")
        sys.exit(code)


@checkpoint.command()
@_where_argument
@click.option("--last", type=click.IntRange(min=1), help="Only so many of each rank, newest first.")
@output_option
def ls(where: str, last: int | None, output: Output) -> None:
    """List a job's checkpoints, the current one first.

    Every byte is read: with many or large ones --last saves time. The states
    are current (a restart resumes from it), intact, damaged, and another job's
    (saved to the same directory); best is that of keep_best. With -o name it
    prints paths, which show accepts.
    """
    entries = [_entry(*each) for each in _examined(*_checkpoint_dirs(where), last)]
    show(output, entries, columns(entries, _CHECKPOINTS), (entry["path"] for entry in entries))


@checkpoint.command("show")
@_which_argument("which")
@_rank_option
@output_option
def show_checkpoint(which: str, rank: int | None, output: Output) -> None:
    """Show the contents of a checkpoint.

    That is its position, its values, and its arrays with their SHA-256.
    """
    body = _document(find_checkpoint(which, rank))
    show(output, body, _document_lines(body), (array["name"] for array in body["arrays"]))


@checkpoint.command()
@_where_argument
@output_option
def verify(where: str, output: Output) -> None:
    """Look for damage in a job's checkpoints.

    Every byte is compared with what was saved. Exit code 1 if a file is damaged
    or LATEST names no checkpoint. With -o name it prints the paths of these.
    """
    location, places = _checkpoint_dirs(where)
    entries = [_entry(*each) for each in _examined(location, places)]
    dangling = {
        (path := f"{place.location}/LATEST"): f"{place.label}  {path} {problem}"
        for place in places
        if (problem := place.problem_of_latest())
    }
    damaged = [entry["path"] for entry in entries if entry["damage"]]
    lines = [
        f"{entry['whose']}  step {entry['step']}  {entry['damage'] or entry['state']}"
        for entry in entries
    ]
    body = {"checkpoints": entries, "strays": [*dangling.values()]}
    show(output, body, [*lines, *dangling.values()], [*damaged, *dangling])
    if damaged or dangling:
        sys.exit(ExitCode.FAILED)


@checkpoint.command()
@_which_argument("first")
@_which_argument("second")
@_rank_option
@output_option
def diff(first: str, second: str, rank: int | None, output: Output) -> None:
    """Compare two checkpoints bit by bit, or those of each rank.

    Exit code 1 if they differ. For example:
    muster checkpoint diff my-job:40 my-job:45
    """
    from muster.checkpoints.comparison import differences  # noqa: PLC0415

    ranks, unequal, entries = [rank], [], 0
    if rank is None and (shared := _ranks(first)) == _ranks(second):
        ranks = shared
    for one in ranks:
        states = []
        for saved in (find_checkpoint(first, one), find_checkpoint(second, one)):
            position = msgspec.to_builtins(saved.position)
            states.append({**saved.state, **{f"position.{at}": n for at, n in position.items()}})
        whose = f"rank {one}: " if len(ranks) > 1 else ""
        found = msgspec.to_builtins(differences(*states))
        unequal += [{**difference, "name": whose + difference["name"]} for difference in found]
        entries += len(states[0])
    body = {"equal": not unequal, "differences": unequal}
    of_ranks = f" of {len(ranks)} ranks" if len(ranks) > 1 else ""
    equal = [f"equal bits: {entries} entries{of_ranks}, including the position"]
    lines = columns(unequal, _DIFFERENCES) if unequal else equal
    show(output, body, lines, (one["name"] for one in unequal))
    if unequal:
        sys.exit(ExitCode.FAILED)


@checkpoint.command()
@_which_argument("which")
@click.argument(
    "target", metavar="TARGET", type=ShellPath(path_type=Path), help="New file or directory."
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["numpy", "safetensors", "torch"]),
    help="The format, if the suffix of TARGET does not say it.",
)
@click.option("--only", metavar="PART", help="Write one part: model, or registered.NAME.")
@click.option("--best", is_flag=True, help="The best one, by keep_best: the same as WHERE:best.")
@_rank_option
def export(
    which: str, target: Path, kind: str | None, only: str | None, rank: int | None, *, best: bool
) -> None:
    """Write a checkpoint for other programs.

    The suffix of TARGET decides the format. .npz: all arrays; without a suffix
    it is a directory of .npy files, where checkpoint.json holds the rest.
    .safetensors: the arrays by their paths. .pt, .pth: what the script saved,
    or state_dict() of a muster.torch job's model and optimizer. For example:
    muster checkpoint export my-job model.safetensors --only model
    """
    from muster.checkpoints.export import FORMATS  # noqa: PLC0415
    from muster.checkpoints.export import export as write  # noqa: PLC0415

    kind = kind or FORMATS.get(target.suffix)
    if kind is None:
        known = ", ".join(filter(None, FORMATS))
        raise click.BadParameter(
            f"{target.suffix} is not supported: name a new file ({known}), or a new directory",
            param_hint="TARGET",
        )
    if best and _parts(which)[1:] != (None, None):
        raise Misuse(f"{which} is one checkpoint: leave out its step, or --best")
    found = find_checkpoint(f"{which}:best" if best else which, rank)
    count = write(found, target, kind, only)
    noun = "directory" if target.is_dir() else "file"
    click.echo(f"the {noun} {target} holds {plural(count, 'array')} of step {found.step}", err=True)


@checkpoint.command("rm")
@_where_argument
def remove(where: str) -> None:
    """Delete the checkpoints of a job that is over, or that was deleted.

    Nothing else in their directory is deleted. The services have to be up, to say
    whether a job needs them.
    """
    if _parts(where)[1:] != (None, None):
        raise Misuse(f"{where} is one checkpoint: rm deletes all of a job; keep_last limits them")
    delete_checkpoints(_checkpoint_dirs(where)[0])


@click.command()
@_where_argument
@output_option
def digest(where: str, output: Output) -> None:
    """Print the SHA-256 of a job's newest state.

    The newest checkpoint of every rank is verified first. Equal digests mean
    equal bits: weights, optimizer state and position in the data.
    """
    from muster.checkpoints.comparison import digests  # noqa: PLC0415

    found = [*digests(_checkpoint_dirs(where)[1])]
    show(
        output,
        [{"whose": whose, "step": step, "sha256": digest} for whose, step, digest in found],
        (f"{digest}  {whose}, step {step}" for whose, step, digest in found),
        (digest for _, _, digest in found),
    )


def _cut(text: str | None) -> str | None:
    is_long = text is not None and len(text) > _CELL_LIMIT
    return f"{text:.{_CELL_LIMIT}}…" if is_long else text


def _entry(place: CheckpointDir, one: ListedCheckpoint) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "whose": place.label,
        "rank": place.rank,
        "path": f"{place.location}/{one.name}",
        "step": one.name.step,
        "generation": one.name.generation,
        "epoch": manifest and manifest.position.epoch,
        "saved_at": manifest and manifest.time,
        "size_bytes": manifest and sum(file.size_bytes for file in manifest.files.values()),
        "state": one.condition.value,
        "is_best": one.is_best,
        "damage": one.damage or None,
    }


def _document(found: Checkpoint) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415

    from muster.checkpoints.comparison import identity_of  # noqa: PLC0415

    manifest = found.manifest
    return {
        "job_id": manifest.job_id,
        "job_uid": manifest.job_uid,
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "step": manifest.step,
        "generation": manifest.generation,
        "saved_at": manifest.time,
        "sha256": identity_of(found),
        "position": msgspec.to_builtins(manifest.position),
        "values": manifest.values,
        "arrays": [
            {
                "name": name,
                "dtype": str(value.dtype),
                "shape": list(value.shape),
                "size_bytes": value.nbytes,
                "sha256": sha256(np.ascontiguousarray(value).data).hexdigest(),
            }
            for name, value in sorted(found.state.items())
            if isinstance(value, np.ndarray)
        ],
    }


def _document_lines(body: Mapping[str, Any]) -> Iterator[str]:
    # The description of nested arrays is long; -o json prints all of it.
    found = sorted(body["values"].items())
    values = ((f"value {name}", f"{json.dumps(value):.200}") for name, value in found)
    yield from facts(
        [
            ("job", body["job_id"]),
            ("rank", f"{body['rank']} of {body['world_size']}"),
            ("step", f"{body['step']}, saved by generation {body['generation']}"),
            ("saved at", f"{moment(body['saved_at'])} UTC"),
            ("sha256", body["sha256"]),
            ("position", json.dumps(body["position"])[1:-1].replace('"', "")),
            *values,
        ]
    )
    if body["arrays"]:
        yield ""
        yield from columns(body["arrays"], _ARRAYS)
