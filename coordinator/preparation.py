"""What must be there before a job's first process: its data, and the place of its checkpoints.

Blocking, so the supervisor does it in a thread. Whatever is missing becomes the verdict on the
job, with a sentence, and never a rank that fails fifty times.
"""

from dataclasses import dataclass
from pathlib import Path

from coordinator.snapshot import Verdict
from muster.completion import complete
from muster.contracts.environ import ServiceSettings
from muster.contracts.job import Reason
from muster.contracts.layout import DataDirectory
from muster.contracts.spec import JobSpec
from muster.datasets.errors import DatasetError
from muster.datasets.listing import find_shards
from muster.datasets.synthetic import ensure_synthetic


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a job reads and writes; all absolute."""

    dataset_dir: Path
    checkpoint_dir: Path
    working_dir: Path


class Unprepared(Exception):
    """The job cannot be run; carries the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


def prepare(spec: JobSpec, settings: ServiceSettings) -> Places:
    """Return the job's places, making the synthetic data set if that is what it trains on.

    Raises `Unprepared`.
    """
    try:
        # Only for jobs that an earlier version has stored; the others are complete.
        completed = complete(spec, settings, Path.cwd())
        if spec.command is None:  # whether it needs data is the command's business
            _ensure_data(completed.dataset_dir, settings)
    except DatasetError as error:
        raise _no_dataset(error) from error
    _refuse_missing(completed.working_dir)
    return Places(
        dataset_dir=completed.dataset_dir,
        checkpoint_dir=completed.checkpoint_dir,
        working_dir=completed.working_dir,
    )


def _ensure_data(directory: Path, settings: ServiceSettings) -> None:
    if directory == DataDirectory(settings.data_dir).synthetic_dataset:
        ensure_synthetic(directory)
    else:
        find_shards(directory)


def _no_dataset(error: DatasetError) -> Unprepared:
    return Unprepared(Verdict(reason=Reason.INVALID_DATASET, message=str(error)))


def _refuse_missing(working_dir: Path) -> None:
    if not _is_directory(working_dir):
        raise Unprepared(
            Verdict(
                reason=Reason.INVALID_PROGRAM,
                message=f"the working directory {working_dir} does not exist: make it first",
            )
        )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, a parent that may not be searched
        return False
