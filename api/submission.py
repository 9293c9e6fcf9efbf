"""From what a person sent to what is stored: defaults filled in, paths absolute, checks made.

Everything that needs no process to be known is refused here, with the field's name, rather than
by a rank minutes later.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from api.problems import Conflict, invalid_field
from api.schemas import JobRequest
from muster.contracts.environ import ServiceSettings
from muster.contracts.job import JobId
from muster.contracts.layout import checkpoints_of_job
from muster.contracts.spec import JobSpec, checked, checked_job_id

RESERVED: Final = frozenset({"summaries", "purge"})
"""No job can be called like a path beside the jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that may be stored."""

    job_id: JobId
    spec: JobSpec
    message: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """Turns requests into submissions. Relative paths are those of `working_dir`."""

    settings: ServiceSettings
    working_dir: Path
    clock: Callable[[], datetime]
    random_hex: Callable[[], str]

    def prepare(self, request: JobRequest) -> Submission:
        """Return what is to be stored.

        Raises `InvalidSpec` and `InvalidRequest` for what cannot be run, `Conflict` for the
        checkpoints of an earlier job under the same id.
        """
        job_id = self._job_id(request)
        asked = checked(_spec(request))
        spec, message = self._with_dataset(self._with_places(asked))
        self._refuse_leftovers(job_id, spec)
        return Submission(job_id=job_id, spec=spec, message=message)

    def _job_id(self, request: JobRequest) -> JobId:
        if request.job_id is None:
            return JobId(f"job-{self.clock():%Y%m%dt%H%M%S}-{self.random_hex()[:6]}")
        if request.job_id in RESERVED:
            raise invalid_field("body", "job_id", f"{request.job_id} is a path of this service")
        return checked_job_id(request.job_id)

    def _with_places(self, spec: JobSpec) -> JobSpec:
        checkpoint_dir = self._absolute(spec.checkpoint_dir) or self.settings.checkpoint_dir
        working_dir = self._absolute(spec.working_dir) or self.working_dir
        if not working_dir.is_dir():
            raise invalid_field("body", "working_dir", f"{working_dir} is not a directory")
        return msgspec.structs.replace(
            spec, checkpoint_dir=str(checkpoint_dir), working_dir=str(working_dir)
        )

    def _with_dataset(self, spec: JobSpec) -> tuple[JobSpec, str | None]:
        named = self._absolute(spec.dataset_dir)
        if named is not None:
            if not named.is_dir():
                raise invalid_field("body", "dataset_dir", f"{named} is not a directory")
            return msgspec.structs.replace(spec, dataset_dir=str(named)), None
        default = self.settings.dataset_dir
        if holds_shards(default):
            return msgspec.structs.replace(spec, dataset_dir=str(default)), None
        if spec.command is not None:
            return spec, None
        return spec, (
            f"no data set was named and none is at {default}: a small synthetic one will be used"
        )

    def _refuse_leftovers(self, job_id: JobId, spec: JobSpec) -> None:
        checkpoint_dir = self._absolute(spec.checkpoint_dir) or self.settings.checkpoint_dir
        own = checkpoints_of_job(checkpoint_dir, job_id)
        if spec.resume_from != job_id and holds_anything(own):
            raise Conflict(
                "checkpoints-left-over",
                f"{own} holds checkpoints of an earlier job {job_id}: give "
                f'"resume_from": "{job_id}" to go on from them, or choose another job_id '
                "(or remove that directory).",
            )
        if spec.resume_from is not None:
            source = checkpoints_of_job(checkpoint_dir, spec.resume_from)
            if not holds_anything(source):
                raise invalid_field("body", "resume_from", f"{source} holds no checkpoints")

    def _absolute(self, path: str | None) -> Path | None:
        return None if path is None else self.working_dir / path


def holds_shards(directory: Path) -> bool:
    """Return whether `directory` has at least one shard file."""
    return any(re.fullmatch(r"shard_\d+\.txt", name) for name in _names(directory))


def holds_anything(directory: Path) -> bool:
    """Return whether `directory` exists and is not empty."""
    return bool(_names(directory))


def _names(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _spec(request: JobRequest) -> JobSpec:
    if request.mode != "independent":
        raise invalid_field("body", "mode", "synchronous training is not available in this version")
    fields = request.model_dump(exclude={"job_id", "mode"})
    command = fields.pop("command")
    return JobSpec(**fields, command=None if command is None else tuple(command))
