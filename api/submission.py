"""From what a person sent to what is stored: defaults filled in, paths absolute, checks made.

Everything that needs no process to be known is refused here, with the field's name, rather than
by a rank minutes later.
"""

import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from api.problems import Conflict, invalid_field
from api.requests import JobRequest
from api.runnable import doubts
from muster.checkpoints.errors import CheckpointMismatch
from muster.checkpoints.modes import holds_checkpoints, refuse_other_mode
from muster.completion import Completed, complete
from muster.contracts.environ import ServiceSettings
from muster.contracts.job import JobId
from muster.contracts.layout import DataDirectory, checkpoints_of_job
from muster.contracts.secrets import Reference, secrets_in_the_clear
from muster.contracts.spec import RESERVED_IDS, JobSpec, Mode, usual_mode
from muster.contracts.spec_problems import checked, checked_job_id
from muster.datasets.errors import DatasetError
from muster.safe import Safe

_SIGNS: Final = string.digits + string.ascii_lowercase
_SUFFIX_LENGTH: Final = 6
"""Two thousand million: of hundreds of jobs in a second hardly one has the id of another."""


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
    checkpoint_dir_of: Callable[[JobId], str | None]
    """Of a job that is known; None for any other id."""
    search_path: str | None
    """Where ranks look for programs, as PATH says it, unless their job says otherwise."""

    def prepare(self, request: JobRequest) -> Submission:
        """Return what is to be stored.

        Raises `InvalidSpec` and `InvalidRequest` for what cannot be run, `Conflict` for the
        checkpoints of an earlier job under the same id, and for those of another mode.
        """
        job_id = self._job_id(request)
        asked = checked(_spec(request))
        earlier_dir = self._earlier_dir(asked)
        with answering_for("dataset_dir"):
            completed = complete(_beside(asked, earlier_dir), self.settings, self.working_dir)
        _refuse_missing(asked, completed)
        _refuse_no_secret(asked, DataDirectory(self.settings.data_dir).secrets)
        _refuse_leftovers(job_id, completed)
        _refuse_nothing_to_resume(completed, earlier_dir)
        message = "; ".join(_notes(completed, self.search_path, self.settings.slots)) or None
        return Submission(job_id=job_id, spec=completed.spec, message=message)

    def _job_id(self, request: JobRequest) -> JobId:
        if request.job_id is None:
            return JobId(f"job-{self.clock():%Y%m%dt%H%M%S}-{_suffix(self.random_hex())}")
        if request.job_id in RESERVED_IDS:
            raise invalid_field("body", "job_id", f"{request.job_id} is a path of this service")
        return checked_job_id(request.job_id)

    def _earlier_dir(self, asked: JobSpec) -> str | None:
        """Return where the job that this one goes on from has its checkpoints, if it is known."""
        return asked.resume_from and self.checkpoint_dir_of(JobId(asked.resume_from))


def _suffix(random_hex: str) -> str:
    number = int(random_hex, 16)
    places = (len(_SIGNS) ** place for place in range(_SUFFIX_LENGTH))
    return "".join(_SIGNS[number // place % len(_SIGNS)] for place in places)


def _beside(asked: JobSpec, earlier_dir: str | None) -> JobSpec:
    """Keep checkpoints where the earlier job does, unless another directory is named.

    The default one may have changed since: it depends on where the service was started.
    """
    if earlier_dir is None or asked.checkpoint_dir is not None:
        return asked
    return msgspec.structs.replace(asked, checkpoint_dir=earlier_dir)


def _refuse_missing(asked: JobSpec, completed: Completed) -> None:
    _refuse_no_directory("working_dir", completed.working_dir)
    if asked.dataset_dir is not None:
        _refuse_no_directory("dataset_dir", completed.dataset_dir)
    _refuse_no_program(asked.program, completed.working_dir)


def _refuse_no_directory(field: str, path: Path) -> None:
    with answering_for(field):
        if not path.is_dir():
            hint = "make one with muster dataset" if field == "dataset_dir" else None
            raise invalid_field("body", field, f"{path} is not a directory", hint)


def _refuse_no_program(reference: str | None, working_dir: Path) -> None:
    place, _, _ = (reference or "").rpartition(":")
    if not place.endswith(".py"):
        return  # a module is found by the rank, which knows its own path
    with answering_for("program"):
        if not (working_dir / place).is_file():
            raise invalid_field("body", "program", f"{working_dir / place} is not a file")


def _refuse_no_secret(asked: JobSpec, directory: Path) -> None:
    """Refuse what is in no file. What the service lends its coordinator knows, when a rank starts.

    The secret itself is not looked at: that is for whoever starts the rank.
    """
    with answering_for("secrets"):
        kept = Safe(directory).names() if asked.secrets else []
    for reference in map(Reference.parse, asked.secrets.values()):
        if reference and reference.source == "file" and reference.name not in kept:
            raise invalid_field(
                "body",
                "secrets",
                f"there is no secret {reference} in {directory}: whoever runs the service keeps "
                f"one there with `muster secret set {reference.name}`",
            )


def _notes(completed: Completed, search_path: str | None, slots: int) -> Iterator[str]:
    """Yield what to know: of places nobody chose, its turn, what all may read, what will not run.

    It stays the message of a job that goes well, so it is as true when the job runs.
    """
    spec = completed.spec
    if completed.note:
        yield completed.note
    if spec.world_size > slots:
        wanted = f"{spec.world_size} ranks are more than the {slots} slots there are (MUSTER_SLOTS)"
        yield f"{wanted}: all of them start together, when no other job runs"
    if shown := ", ".join(secrets_in_the_clear(spec.env)):
        yield f"env shows {shown} to whoever may submit jobs: secrets keeps it to the ranks"
    if spec.command is not None:
        path = spec.env.get("PATH", search_path)
        yield from doubts(spec.command, completed.working_dir, path)


def _refuse_leftovers(job_id: JobId, completed: Completed) -> None:
    own = checkpoints_of_job(completed.checkpoint_dir, job_id)
    resume_from = completed.spec.resume_from
    with answering_for("checkpoint_dir"):
        if resume_from != job_id and holds_checkpoints(own):
            raise Conflict(
                "checkpoints-left-over",
                f"{own} holds checkpoints of an earlier job {job_id}: give "
                f'"resume_from": "{job_id}" to go on from them, or choose another job_id '
                "(or remove that directory).",
            )


def _refuse_nothing_to_resume(completed: Completed, earlier_dir: str | None) -> None:
    resume_from = completed.spec.resume_from
    if resume_from is None:
        return
    source = checkpoints_of_job(completed.checkpoint_dir, resume_from)
    with answering_for("checkpoint_dir"):
        if not holds_checkpoints(source):
            where = _where_instead(completed, earlier_dir)
            raise invalid_field("body", "resume_from", f"{source} holds no checkpoints{where}")
        _refuse_other_mode(source, completed.spec.mode)


def _where_instead(completed: Completed, earlier_dir: str | None) -> str:
    """Return where a person may find the checkpoints that are not in the directory looked at."""
    earlier = completed.spec.resume_from
    if earlier_dir is None:
        return f", and no job {earlier} is known: checkpoint_dir names the directory above them"
    if Path(earlier_dir) == completed.checkpoint_dir:
        return ""
    own = checkpoints_of_job(Path(earlier_dir), str(earlier))
    return f"; those of job {earlier} are kept in {own}: leave checkpoint_dir out to go on there"


def _refuse_other_mode(source: Path, mode: Mode) -> None:
    try:
        refuse_other_mode(source, mode)
    except CheckpointMismatch as error:
        raise Conflict("checkpoints-of-another-mode", f"{error}.") from error


@contextmanager
def answering_for(field: str) -> Iterator[None]:
    """Refuse `field` where the system refuses what it names: too long, not ours to look into."""
    try:
        yield
    except OSError as error:
        raise invalid_field(
            "body", field, f"{error.filename} cannot be used ({error.strerror})"
        ) from error
    except DatasetError as error:
        raise invalid_field("body", field, str(error)) from error


def _spec(request: JobRequest) -> JobSpec:
    fields = request.model_dump(exclude={"job_id"})
    command, mode = fields.pop("command"), fields.pop("mode")
    return JobSpec(
        **fields,
        command=None if command is None else tuple(command),
        mode=mode or usual_mode(command),
    )
