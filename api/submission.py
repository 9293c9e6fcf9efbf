"""From a request to what is stored: defaults filled in, paths absolute, checks made.

What can be known without starting a process is refused here, with the name of the field, rather
than by a rank minutes later.
"""

import asyncio
import base64
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final, TypeAlias

import msgspec
from anyio.to_thread import run_sync
from msgspec.structs import replace

from api.access.auth import User
from api.errors import Conflict, ServiceUnavailable, invalid_field
from database.errors import JobExists
from database.jobs import NewJob
from database.records import Job
from muster.checkpoints.errors import CheckpointError, CheckpointFailed, CheckpointMismatch
from muster.checkpoints.listing import (
    checkpoint_dirs,
    holds_checkpoints,
    refuse_other_mode,
    refuse_other_schedule,
    values_of_newest,
)
from muster.cluster.description import Cluster
from muster.cluster.members import Members
from muster.cluster.placement import RankRequest, place
from muster.contracts.errors import InvalidDescription
from muster.contracts.job.field_types import RESERVED_IDS, compression_facts
from muster.contracts.job.problems import checked, checked_job_id
from muster.contracts.job.secrets import Reference, plaintext_secrets
from muster.contracts.job.spec import CLUSTER_FIELDS, JobRequest, JobSpec
from muster.contracts.job.status import JobId
from muster.contracts.location import (
    InvalidLocation,
    expand_home,
    moved_job,
    parse_location,
)
from muster.contracts.relay import RelayedClient
from muster.contracts.settings.paths import DataDir, checkpoints_of_job
from muster.contracts.settings.services import ServiceSettings
from muster.datasets.errors import DatasetError, DatasetMissing
from muster.datasets.source import LocalSource
from muster.datasets.sources import open_source
from muster.datasets.synthetic import synthetic
from muster.host.code import copy_code
from muster.host.programs import command_problem, path_with, with_interpreter
from muster.job_defaults import ResolvedSpec, resolve
from muster.objects.client import default_client
from muster.objects.errors import ObjectStoreError, StoreUnavailable
from muster.objects.probe import check_store
from muster.runtime.secrets import SecretStore

SUFFIX_DIGITS: Final = 10
"""Of the random part of an id, in hexadecimal. Of 500 jobs in a second two get the same id in one
of 9 million cases; the second one is refused."""


NEEDED: Final = {
    "ssh": "MUSTER_CLUSTER, see docs/cluster.md",
    "mesh": "`muster node`, see docs/home.md",
}
"""By engine, what makes other machines known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that may be stored."""

    job_id: JobId
    spec: JobSpec
    message: str | None
    shards: int | None  # of the data set; None for a command


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitter:
    """Turns requests into submissions. Relative paths are relative to `working_dir`."""

    settings: ServiceSettings
    read_cluster: Callable[[], Cluster]
    """Returns the machines that there are now."""
    working_dir: Path
    clock: Callable[[], datetime]
    random_hex: Callable[[], str]
    checkpoint_dir_of: Callable[[JobId], str | None]
    """Of a stored job; None for any other id."""
    search_path: str | None
    """Where ranks look for programs (PATH), unless their job has its own."""
    read_members: Callable[[], Members] = Members
    """Returns the same, if they are nodes of a household."""

    @property
    def cluster(self) -> Cluster:
        return self.read_cluster()

    def prepare(self, request: JobRequest, copy: Path | None = None) -> Submission:
        """Return what to store; `copy` is made if the job wants a snapshot of its code.

        Raises `InvalidSpec` and `InvalidRequest` for a job that cannot run, `Conflict` for
        checkpoints of an earlier job, of another mode or of another schedule, `JobExists` for the
        id of a stored job that has checkpoints, `ServiceUnavailable` if a place does not answer.
        """
        job_id = self._job_id(request)
        if request.engine is not None and request.engine not in self.settings.engines:
            may = ", ".join(sorted(self.settings.engines))
            words = f"this service may use {may}: add {request.engine} to its MUSTER_ENGINES"
            raise invalid_field("body", "engine", words)
        spec = checked(request.spec())
        if spec.hosts and (names := self.read_members().names):
            ids = {name: node for node, name in names.items()}
            spec = replace(spec, hosts=[ids.get(name, name) for name in spec.hosts])
        earlier_dir = None
        if spec.earlier is not None:
            earlier_dir = self.checkpoint_dir_of(JobId(spec.earlier.job))
            if earlier_dir is not None and spec.checkpoint_dir is None:
                # Resume where the earlier job saved: the default may have changed since.
                spec = msgspec.structs.replace(spec, checkpoint_dir=earlier_dir)
        with refusing("dataset_dir"):
            resolved = resolve(spec, self.settings, self.working_dir)
        _check_hosts(job_id, resolved.spec, self.cluster)
        _refuse_missing_files(spec, resolved, self.search_path)
        stored = resolved.spec
        if spec.code == "snapshot":
            stored = _snapshot(resolved, self.cluster, copy)
        with refusing("dataset_dir"):
            synthetic_dir = DataDir(self.settings.data_dir).synthetic_dataset
            shards, remarks = _check_data(spec, resolved, synthetic_dir)
        _refuse_missing_secrets(spec, DataDir(self.settings.data_dir).secrets)
        with refusing("checkpoint_dir"):
            self._check_checkpoints(job_id, resolved, earlier_dir)
        with refusing("resume_from"):
            stored = replace(stored, resume_from=_resume_point(resolved))
        remarks = [*_remarks(resolved, self.cluster, self.settings.slots), *remarks]
        is_at_home = len(self.read_members().nodes) > 1
        if is_at_home and spec.needs_majority and isinstance(resolved.checkpoint_dir, Path):
            remarks += ["its checkpoints are on the machine that leads, without a second copy"]
        message = "; ".join(remarks) or None
        return Submission(job_id=job_id, spec=stored, message=message, shards=shards)

    def _job_id(self, request: JobRequest) -> JobId:
        if request.job_id is None:
            random = base64.b32encode(bytes.fromhex(self.random_hex()[:SUFFIX_DIGITS]))
            return JobId(f"job-{self.clock():%Y%m%dt%H%M%S}-{random.decode().lower()}")
        if request.job_id in RESERVED_IDS:
            raise invalid_field("body", "job_id", f"{request.job_id} is a path of this service")
        return checked_job_id(request.job_id)

    def _check_checkpoints(
        self, job_id: JobId, resolved: ResolvedSpec, earlier_dir: str | None
    ) -> None:
        """Refuse checkpoints that the job would overwrite, and a resume that finds none."""
        earlier = resolved.spec.earlier.job if resolved.spec.earlier else None
        own = checkpoints_of_job(resolved.checkpoint_dir, job_id)
        if earlier != job_id and holds_checkpoints(own):
            if self.checkpoint_dir_of(job_id) is not None:
                raise JobExists(job_id)
            raise Conflict(
                "checkpoints-left-over",
                f"{own} holds checkpoints of an earlier job {job_id}: continue from them with "
                f"resume_from {job_id}, choose another job_id, or remove them.",
            )
        if earlier is None:
            return
        source = checkpoints_of_job(resolved.checkpoint_dir, earlier)
        if not holds_checkpoints(source):
            where = ""
            if earlier_dir is None:
                where = f", and there is no job {earlier}: checkpoint_dir is the directory above it"
            elif (saved_to := parse_location(earlier_dir)) != resolved.checkpoint_dir:
                saved = checkpoints_of_job(saved_to, earlier)
                where = f"; job {earlier} saved to {saved}: leave out checkpoint_dir to use it"
            raise invalid_field("body", "resume_from", f"{source} holds no checkpoints{where}")
        spec, slug = resolved.spec, "checkpoints-of-another-mode"
        wanted: dict[str, object] = {"batch_size": spec.effective_batch_size, "seed": spec.seed}
        wanted |= {"virtual_shards": spec.virtual_shards, "compression": "none"}
        wanted |= compression_facts(spec.compression, spec.effective_compression_groups)
        wanted = {name: value for name, value in wanted.items() if name not in spec.left_to_script}
        try:
            refuse_other_mode(source, spec.mode)
            slug = "checkpoints-of-another-schedule"
            refuse_other_schedule(values_of_newest(source), wanted, f"in {source}")
        except CheckpointMismatch as error:
            raise Conflict(slug, f"{error}.") from error


def at_home(requested: JobRequest, user: User) -> JobRequest:
    """Return a request with the paths of this machine for those below the home of another node."""
    if not (isinstance(user, RelayedClient) and user.home.startswith("/")):
        return requested
    return moved_job(requested, ((user.home, expand_home("~")),))


def _resume_point(resolved: ResolvedSpec) -> str | None:
    """Return the text of `resume_from` with a step in place of `best`; every rank has it."""
    earlier = resolved.spec.earlier
    if earlier is not None and earlier.step is not None:
        places = checkpoint_dirs(checkpoints_of_job(resolved.checkpoint_dir, earlier.job))
        steps = [place.name_of(earlier.step).step for place in places]
        earlier = replace(earlier, step=steps[0])
    return None if earlier is None else str(earlier)


@contextmanager
def refusing(field: str) -> Iterator[None]:
    """Refuse `field` if the system cannot use the place in it."""
    try:
        yield
    except OSError as error:
        raise invalid_field(
            "body", field, f"{error.filename} cannot be used ({error.strerror})"
        ) from error
    except (CheckpointFailed, StoreUnavailable) as error:
        raise ServiceUnavailable(f"{field}: {error}") from error
    except (CheckpointError, DatasetError, InvalidLocation, ObjectStoreError) as error:
        raise invalid_field("body", field, str(error)) from error


def _check_hosts(job_id: JobId, spec: JobSpec, cluster: Cluster) -> None:
    """Refuse a job whose ranks would never have a host."""
    if spec.scheduled_hosts:
        return
    if not cluster.is_described:
        if needed := NEEDED.get(spec.engine or ""):
            raise invalid_field("body", "engine", f"{spec.engine} needs {needed}")
        for field in CLUSTER_FIELDS:
            if getattr(spec, field) is not None:
                how = "set MUSTER_CLUSTER for the services, see docs/cluster.md"
                raise invalid_field("body", field, f"needs a cluster: {how}")
        return
    try:
        for name in spec.hosts or ():
            cluster.node(name)
    except InvalidDescription as error:
        raise invalid_field("body", "hosts", str(error)) from error
    anywhere = place(cluster, [RankRequest(job_id, spec)] * spec.world_size)
    if missing := [placement for placement in anywhere if placement.chosen is None]:
        raise invalid_field(
            "body",
            "world_size",
            f"only {spec.world_size - len(missing)} of {spec.world_size} ranks fit on the nodes "
            f"of the cluster file if free ({missing[0]}): ask for fewer, or see muster plan",
        )


def _refuse_missing_files(spec: JobSpec, resolved: ResolvedSpec, search_path: str | None) -> None:
    with refusing("working_dir"):
        if not resolved.working_dir.is_dir():
            message = f"{resolved.working_dir} is not a directory"
            raise invalid_field("body", "working_dir", message)
    python = None if spec.engine == "kubernetes" else resolved.spec.python  # an image has its own
    if python is not None and not (os.path.isfile(python) and os.access(python, os.X_OK)):  # noqa: PTH113
        raise invalid_field("body", "python", f"{python} is not an executable file")
    if spec.checkpoint_dir is not None or spec.command is None:
        with refusing("checkpoint_dir"):
            if isinstance(resolved.checkpoint_dir, Path):
                _refuse_unwritable(resolved.checkpoint_dir)
            else:
                check_store(default_client(), resolved.checkpoint_dir)
    file, _, _ = (spec.program or "").rpartition(":")
    if file.endswith(".py"):  # a rank finds modules by its own path
        with refusing("program"):
            if not (resolved.working_dir / file).is_file():
                message = f"{resolved.working_dir / file} is not a file"
                raise invalid_field("body", "program", message)
    if spec.command is not None:
        # A file that comes later is too late: the job may start at once.
        places = path_with(python, spec.env.get("PATH", search_path))
        argv = with_interpreter(spec.command, python, spec.env)  # as an agent does
        if problem := command_problem(argv, resolved.working_dir, places):
            raise invalid_field("body", "command", problem)


def _snapshot(resolved: ResolvedSpec, cluster: Cluster, copy: Path | None) -> JobSpec:
    """Copy the code of a job and return the job with its script there, or refuse it."""
    spec, script, command = resolved.spec, resolved.script, list(resolved.spec.command or ())
    allowed = spec.hosts or [node.name for node in cluster.nodes]
    others = (node for node in cluster.nodes if node.transport != "local" and node.name in allowed)
    if spec.engine != "local" and (spec.scheduled_hosts or any(others)):
        words = "ranks may run on other hosts, which do not have the snapshot: leave it out"
        raise invalid_field("body", "code", words)
    if script is None or (script.is_module and not Path(*command[:1]).name.startswith("python")):
        words = "snapshot needs a script: python train.py, python -m train, or a program"
        raise invalid_field("body", "code", words)
    with refusing("code"):
        copy_code(script.root, copy)
    if copy is None:
        return spec
    file = str(copy / Path(script.file).relative_to(script.root))
    if spec.program is not None:
        return replace(spec, program=f"{file}:{spec.program.rpartition(':')[2]}")
    place = command.index(script.word)
    if not script.is_module:
        command[place] = file
        return replace(spec, command=tuple(command))
    command.insert(place - 1, "-P")  # or Python would look into the working directory first
    path = ":".join(filter(None, [str(copy), spec.env.get("PYTHONPATH")]))
    return replace(spec, command=tuple(command), env={**spec.env, "PYTHONPATH": path})


def _check_data(
    spec: JobSpec, resolved: ResolvedSpec, synthetic_dir: Path
) -> tuple[int | None, list[str]]:
    """Return the number of shards of a job's data set, and what the user should know of them.

    It is None for a command, which reads what it needs itself. Raises `DatasetError` for a data set
    with which the job would fail.
    """
    location = resolved.dataset_dir
    is_missing = isinstance(location, Path) and not location.is_dir()
    if spec.command is not None:
        if spec.dataset_dir is not None and is_missing:
            raise DatasetMissing(location, "is not a directory", "name one that exists")
        return None, []
    if location == synthetic_dir and is_missing:
        return synthetic().facts.shards, []  # the coordinator writes it when the job starts
    source = resolved.source or open_source(location)
    return len(source.shards), [*source.remarks()] if isinstance(source, LocalSource) else []


def _refuse_unwritable(checkpoint_dir: Path) -> None:
    """Refuse a directory that a rank cannot make, or in which it cannot save."""
    places = checkpoint_dir, *checkpoint_dir.parents
    place = next(place for place in places if os.path.lexists(place))
    try:
        TemporaryFile(dir=place).close()  # os.access() says yes to root, even in /proc
    except OSError as error:
        message = f"the service's user cannot write to {place} ({error.strerror}): name another"
        raise invalid_field("body", "checkpoint_dir", f"{message}, or leave it out") from error


def _refuse_missing_secrets(spec: JobSpec, directory: Path) -> None:
    """Refuse references to missing files. The coordinator checks those to its environment."""
    if not spec.secrets:
        return
    with refusing("secrets"):
        kept = SecretStore(directory).names()
    for reference in map(Reference.parse, spec.secrets.values()):
        if reference and reference.source == "file" and reference.name not in kept:
            raise invalid_field(
                "body",
                "secrets",
                f"there is no secret {reference} in {directory}: store it there as the user of "
                f"the service with `muster secret set {reference.name}`",
            )


def _remarks(resolved: ResolvedSpec, cluster: Cluster, slots: int) -> Iterator[str]:
    """Yield what the user should know. It stays the message of the job, also while it runs."""
    spec = resolved.spec
    if resolved.note:
        yield resolved.note
    if spec.compression is not None and not cluster.is_described and not spec.scheduled_hosts:
        yield f"compression {spec.compression} saves nothing on one host, where it only rounds"
    if spec.world_size > slots and not (cluster.is_described or spec.scheduled_hosts):
        wanted = f"{spec.world_size} ranks are more than the {slots} slots there are (MUSTER_SLOTS)"
        yield f"{wanted}: all of them start together, when no other job runs"
    if spec.bits == "any":
        yield "bits any: another run, or another number of ranks, may give another result"
    if shown := ", ".join(plaintext_secrets(spec.env)):
        yield f"env shows {shown} to everyone who may submit jobs: use secrets instead"


Outcomes: TypeAlias = Sequence[Job | Exception]
_Waiting: TypeAlias = list[tuple[NewJob, "asyncio.Future[Job]"]]


class SubmissionQueue:
    """Group commit: jobs that arrive while others are being stored share the next transaction.

    For one event loop. `store` runs in a thread.
    """

    def __init__(self, store: Callable[[Sequence[NewJob]], Outcomes]) -> None:
        self._store_all = store
        self._waiting: _Waiting = []
        self._storing: asyncio.Task[None] | None = None

    async def store(self, new: NewJob) -> Job:
        """Return the job once it is durable, or raise why it is not stored."""
        stored: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        self._waiting.append((new, stored))
        if self._storing is None:
            self._storing = asyncio.create_task(self._run())
        return await stored

    async def _run(self) -> None:
        batch: _Waiting = []
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._store_batch(batch)
        finally:
            self._storing = None
            for _, stored in batch + self._waiting:  # the service ends
                stored.cancel()
            self._waiting = []

    async def _store_batch(self, batch: _Waiting) -> None:
        try:
            outcomes = await run_sync(self._store_all, [new for new, _ in batch])
        except Exception as error:  # noqa: BLE001  each request in the batch must get an answer
            outcomes = [error] * len(batch)
        for (_, stored), outcome in zip(batch, outcomes, strict=True):
            if stored.cancelled():
                continue  # the client has gone; its idempotency key finds the job
            if isinstance(outcome, Exception):
                stored.set_exception(outcome)
            else:
                stored.set_result(outcome)
