"""What a person left out of a job, filled in once: by whoever stores it, before it is stored.

A stored job knows where it reads and writes. A coordinator that takes it up after a crash, with
other settings or beside a data set that has appeared since, goes on with the very same data.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from muster.contracts.environ import ServiceSettings
from muster.contracts.layout import DataDirectory
from muster.contracts.spec import JobSpec
from muster.datasets.errors import DatasetEmpty, DatasetMissing
from muster.datasets.listing import find_shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A job whose places are all known, and absolute; `spec` names the same."""

    spec: JobSpec
    dataset_dir: Path
    checkpoint_dir: Path
    working_dir: Path
    note: str | None
    """What the person should know about a place nobody chose."""


def complete(spec: JobSpec, settings: ServiceSettings, working_dir: Path) -> Completed:
    """Return the job with every place filled in; relative paths are those of `working_dir`.

    A place that was named is taken as it is, whatever is there. A job without a data set gets
    the default one; the built-in program, if that has no shards, the synthetic one, which is not
    made here. Raises `ShardUnreadable` if that cannot be told. Completing twice changes nothing.
    """
    dataset_dir, note = _dataset(spec, settings, working_dir)
    checkpoint_dir = _named(spec.checkpoint_dir, working_dir) or settings.checkpoint_dir
    own_dir = _named(spec.working_dir, working_dir) or working_dir
    return Completed(
        spec=msgspec.structs.replace(
            spec,
            dataset_dir=str(dataset_dir),
            checkpoint_dir=str(checkpoint_dir),
            working_dir=str(own_dir),
        ),
        dataset_dir=dataset_dir,
        checkpoint_dir=checkpoint_dir,
        working_dir=own_dir,
        note=note,
    )


def _dataset(
    spec: JobSpec, settings: ServiceSettings, working_dir: Path
) -> tuple[Path, str | None]:
    named = _named(spec.dataset_dir, working_dir)
    if named is not None:
        return named, None
    default = settings.dataset_dir
    is_builtin = spec.command is None and spec.program is None
    if not is_builtin or _holds_data(default):
        return default, None
    return DataDirectory(settings.data_dir).synthetic_dataset, (
        f"no data set was named and none is at {default}: a small synthetic one will be used"
    )


def _holds_data(directory: Path) -> bool:
    try:
        find_shards(directory)
    except (DatasetMissing, DatasetEmpty):
        return False
    return True


def _named(path: str | None, working_dir: Path) -> Path | None:
    return None if path is None else working_dir / path
