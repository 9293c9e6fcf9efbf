"""What would become of a job: everything that is known of it before its first process."""

from pathlib import Path
from typing import Final

import msgspec

from api.schemas import JobPlan
from api.submission import Submission, answering_for
from muster.contracts.shards import ranges, shards_of_rank
from muster.contracts.spec import JobSpec
from muster.datasets.listing import find_shards
from muster.datasets.synthetic import synthetic

LAUNCHER: Final = "local"
"""Agents are processes of the coordinator's machine."""


def plan(submission: Submission, synthetic_dataset: Path) -> JobPlan:
    """Return the plan of a job that may be stored.

    The data set at `synthetic_dataset` is made when it is first needed; any other must be there:
    raises `InvalidRequest`.
    """
    spec = submission.spec
    per_rank = _shards_per_rank(spec, synthetic_dataset)
    return JobPlan(
        job_id=submission.job_id,
        message=submission.message,
        launcher=LAUNCHER,
        world_size=spec.world_size,
        command=None if spec.command is None else list(spec.command),
        program=spec.program,
        shards=None if per_rank is None else sum(per_rank),
        shards_per_rank=per_rank,
        spec=msgspec.to_builtins(spec),
    )


def _shards_per_rank(spec: JobSpec, synthetic_dataset: Path) -> list[int] | None:
    if spec.command is not None or spec.dataset_dir is None:
        return None
    found = _shards(Path(spec.dataset_dir), synthetic_dataset)
    if spec.mode == "synchronous":
        return [stop - start for start, stop in ranges(spec.virtual_shards, spec.world_size)]
    numbers = range(found)
    return [len(shards_of_rank(numbers, rank, spec.world_size)) for rank in range(spec.world_size)]


def _shards(directory: Path, synthetic_dataset: Path) -> int:
    if directory == synthetic_dataset and not directory.is_dir():
        return synthetic().facts.shards
    with answering_for("dataset_dir"):
        return len(find_shards(directory))
