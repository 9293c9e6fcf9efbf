"""Fills in what a job leaves out, once, before the job is stored.

A stored job names the directories it reads and writes. A coordinator that takes it over with other
settings, or after a data set has appeared at the default place, continues with the same data.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from muster.contracts.job.spec import JobSpec
from muster.contracts.location import Location, parse_location
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.datasets.errors import DatasetEmpty, DatasetMissing
from muster.datasets.source import DataSource
from muster.datasets.sources import open_source
from muster.host.code import Script, script_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpec:
    """A job with known, absolute directories; `spec` names the same."""

    spec: JobSpec
    dataset_dir: Location
    checkpoint_dir: Location
    working_dir: Path
    script: Script | None
    note: str | None
    """What the user should know about a default directory."""
    source: DataSource | None
    """The default data set, opened to see whether it is there."""


def resolve(spec: JobSpec, settings: ServiceSettings, working_dir: Path) -> ResolvedSpec:
    """Return the job with every directory filled in; relative paths start at `working_dir`.

    A named directory is used whether or not it exists. A job without a data set gets the default
    one. If that has no shards, the built-in program gets the synthetic data set, which is not
    created here. Resolving twice changes nothing. Raises `ShardUnreadable`.
    """
    checkpoint_dir = settings.checkpoint_dir
    if spec.checkpoint_dir is not None:
        checkpoint_dir = parse_location(spec.checkpoint_dir, working_dir)
    own_dir = working_dir if spec.working_dir is None else working_dir / spec.working_dir
    python = None if spec.python is None else str(working_dir / spec.python)
    dataset_dir, note, source = settings.dataset_dir, None, None
    if spec.dataset_dir is not None:
        dataset_dir = parse_location(spec.dataset_dir, working_dir)
    elif spec.command is None and spec.program is None:
        try:
            source = open_source(dataset_dir)
        except (DatasetMissing, DatasetEmpty) as error:
            there = f"{dataset_dir} {error.problem}"
            note = f"no data set was named and {there}: a small synthetic one will be used"
            dataset_dir = DataDir(settings.data_dir).synthetic_dataset
    return ResolvedSpec(
        spec=msgspec.structs.replace(
            spec,
            dataset_dir=str(dataset_dir),
            checkpoint_dir=str(checkpoint_dir),
            working_dir=str(own_dir),
            python=python,
        ),
        dataset_dir=dataset_dir,
        checkpoint_dir=checkpoint_dir,
        working_dir=own_dir,
        script=script_of(spec.command, spec.program, own_dir),
        note=note,
        source=source,
    )
