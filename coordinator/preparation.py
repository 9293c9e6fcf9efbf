"""What must be there before a job's first process: its data, and the place of its checkpoints.

Blocking, so the supervisor does it in a thread. Whatever is missing becomes the verdict on the
job, with a sentence, and never a rank that fails fifty times.
"""

from dataclasses import dataclass
from pathlib import Path

from coordinator.snapshot import Verdict
from muster.contracts.environ import ServiceSettings
from muster.contracts.job import Reason
from muster.contracts.layout import DataDirectory
from muster.contracts.spec import JobSpec
from muster.datasets.errors import DatasetEmpty, DatasetError, DatasetMissing
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
    """Return the job's places, making a synthetic data set where none was named or found.

    Raises `Unprepared`.
    """
    return Places(
        dataset_dir=_dataset(spec, settings),
        checkpoint_dir=_absolute(spec.checkpoint_dir, settings.checkpoint_dir),
        working_dir=_working_dir(spec),
    )


def _dataset(spec: JobSpec, settings: ServiceSettings) -> Path:
    directory = _absolute(spec.dataset_dir, settings.dataset_dir)
    if spec.command is not None:
        return directory  # whether it needs data is the command's business
    try:
        find_shards(directory)
    except (DatasetMissing, DatasetEmpty) as error:
        if spec.dataset_dir is not None:
            raise _no_dataset(error) from error
        return _synthetic(settings)
    except DatasetError as error:
        raise _no_dataset(error) from error
    return directory


def _synthetic(settings: ServiceSettings) -> Path:
    try:
        return ensure_synthetic(DataDirectory(settings.data_dir).synthetic_dataset)
    except DatasetError as error:
        raise _no_dataset(error) from error


def _no_dataset(error: DatasetError) -> Unprepared:
    return Unprepared(Verdict(reason=Reason.INVALID_DATASET, message=str(error)))


def _working_dir(spec: JobSpec) -> Path:
    directory = _absolute(spec.working_dir, Path.cwd())
    if not _is_directory(directory):
        raise Unprepared(
            Verdict(
                reason=Reason.INVALID_PROGRAM,
                message=f"the working directory {directory} does not exist: make it first",
            )
        )
    return directory


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, a parent that may not be searched
        return False


def _absolute(named: str | None, default: Path) -> Path:
    return default if named is None else Path(named).absolute()
