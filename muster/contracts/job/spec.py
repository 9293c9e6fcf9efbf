"""The description of a job: one declaration per field, with type, limits, default and meaning.

The REST body, the JSON schema of job files, the OpenAPI document and docs/reference/job-fields.md
are derived from it. `muster.contracts.job.problems` checks what spans several fields.
"""

from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from muster.contracts.job.engine import (
    SCHEDULERS,
    Engine,
    KubernetesOptions,
    SlurmOptions,
    scheduled_hosts,
)
from muster.contracts.job.field_types import (
    COMPRESSION_GROUPS,
    COMPRESSION_GROUPS_LIMIT,
    COMPRESSION_PATTERN,
    COMPRESSION_WANTED,
    INDEPENDENT_BATCH_SIZE,
    JOB_ID_PATTERN,
    JOB_ID_WANTED,
    RESUME_PATTERN,
    RESUME_WANTED,
    SAMPLES_PER_SHARD_MIN,
    SECONDS_LIMIT,
    SYNCHRONOUS_BATCH_SIZE,
    BackendChoice,
    Bits,
    CheckpointEvery,
    CodeChoice,
    KeepBest,
    Megabytes,
    Mode,
    NodeName,
    RandomCompression,
    RestartScope,
    ResumeFrom,
)

CLUSTER_FIELDS: Final = ("vram_mb", "ram_mb", "hosts")
"""Fields that mean something only to a service that has a cluster file."""

_RankCount: TypeAlias = Annotated[int, Meta(ge=1, le=4096)]
_Count: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
_Budget: TypeAlias = Annotated[int, Meta(ge=0, le=1_000_000)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=1, le=SECONDS_LIMIT)]


def _doc(text: str) -> Meta:
    return Meta(description=text)


_MODE_MEANING: Final = (
    "In independent mode each rank works through its own shards; in synchronous mode all ranks "
    "hold one model, and their number may change while it trains."
)
_EVERY_MEANING: Final = Meta(
    description="Steps between checkpoints, or auto: as often as takes 2 % of the time. Default: "
    "auto for a command in synchronous mode, else 5. A warning names a better number if saving "
    "takes more than a tenth of the time.",
    extra={"wanted": "a number of steps, or auto"},
)
_COMMAND_WANTED: Final = (
    'a list of words, such as ["python", "train.py"], or for a shell line '
    '["sh", "-c", "python train.py > log"]'
)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as it is stored. ``JobSpec()`` is a job of four ranks with all defaults."""

    name: Annotated[str | None, _doc("A name for people.")] = None
    mode: Annotated[Mode, _doc(_MODE_MEANING)] = "independent"
    world_size: Annotated[_RankCount, _doc("Number of ranks.")] = 4
    min_workers: Annotated[_RankCount, _doc("Fewest ranks with which training goes on.")] = 1
    max_workers: Annotated[_RankCount | None, _doc("Most ranks. Default: the world size.")] = None
    spare_ranks: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="Processes of a synchronous job that have loaded its program and wait to "
            "replace a rank that dies. They take no slots.",
        ),
    ] = 1
    epochs: Annotated[_Count, _doc("Passes over the data.")] = 1
    batch_size: Annotated[
        _Count | None,
        _doc(
            "Samples per step (of one rank in independent mode). Default: 16 "
            "independent, 64 synchronous, where it is a multiple of virtual_shards."
        ),
    ] = None
    virtual_shards: Annotated[
        _RankCount,
        _doc(
            "Equal parts of every batch of a synchronous job; a power of two. Your gradient "
            "function is called once for each, 32 times a step by default; 8 is about three times "
            "faster for small models. Batch size and virtual shards decide the bits of the result, "
            "the number of ranks does not."
        ),
    ] = 32
    compression: Annotated[
        Annotated[str, Meta(pattern=COMPRESSION_PATTERN, extra={"wanted": COMPRESSION_WANTED})]
        | RandomCompression
        | None,
        Meta(
            description="How the hosts of a synchronous job send each other gradients: int8, "
            "bf16, fp16, or random with a ratio, of which the text is random:RATIO. Part of the "
            "numerics, like virtual_shards, also on one host, where it saves nothing. Default: "
            "whole, as float32.",
            examples=["int8", {"kind": "random", "ratio": 0.1}],
        ),
    ] = None
    compression_groups: Annotated[
        Annotated[int, Meta(ge=1, le=COMPRESSION_GROUPS_LIMIT)] | None,
        _doc(
            "Into how many sums compression rounds a gradient, and so the most hosts that compute; "
            "a power of two. Default: 8, or virtual_shards if that is less."
        ),
    ] = None
    backend: Annotated[
        BackendChoice,
        _doc("Transport between the ranks of a synchronous job; auto: shared memory on one host."),
    ] = "auto"
    replay_every: Annotated[
        _RankCount | None,
        _doc("One virtual shard in this many is computed by a second rank and compared."),
    ] = None
    bits: Annotated[
        Bits,
        _doc(
            "same: ranks of a synchronous job that compute other bits than the others are refused. "
            "any: they train with them, as processors of different kinds do; the result then "
            "depends on which rank computed what."
        ),
    ] = "same"
    code: Annotated[
        CodeChoice,
        _doc(
            "same: no rank of a synchronous job trains other code than the first ones: a host with "
            "an old copy is set aside, and the job fails if the code was changed. any: an event "
            "names the file. snapshot: same, with a copy of the script and the files below its "
            "directory, made at submission. In independent mode a change is only an event."
        ),
    ] = "same"
    seed: Annotated[
        int,
        Meta(
            ge=0, le=2**63 - 1, description="Decides the order of samples and the initial weights."
        ),
    ] = 0
    checkpoint_every: Annotated[CheckpointEvery, _EVERY_MEANING] = 5
    keep_last: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Checkpoints kept per rank; a gang keeps at least 3, in a store 4.",
        ),
    ] = 3
    keep_best: Annotated[
        KeepBest | None,
        Meta(
            description="The checkpoint with the least metric (mode: max, the greatest) that a "
            "script with muster.torch has given to run.report in run.after_step on the rank that "
            "saves. It is saved at that very step, and kept beside the newest ones.",
            examples=[{"metric": "val_loss", "mode": "min"}],
        ),
    ] = None
    sleep_sec: Annotated[
        float,
        Meta(ge=0, le=3600, description="Pause after each step of a managed program, for demos."),
    ] = 0.0
    dataset_dir: Annotated[
        str | None,
        _doc(
            "Where the shards are: a directory, or s3://bucket/prefix. Default: the server's, or a "
            "small synthetic data set."
        ),
    ] = None
    checkpoint_dir: Annotated[
        str | None,
        _doc(
            "Where checkpoints go: a directory, or s3://bucket/prefix. Default: that of the job in "
            "resume_from, or the server's."
        ),
    ] = None
    command: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="The argv every rank becomes. Default: `program`.",
            extra={"wanted": _COMMAND_WANTED},
        ),
    ] = None
    program: Annotated[
        str | None,
        _doc(
            "What a synchronous job trains: file.py:Name (relative to working_dir) or "
            "package.module:Name. Default: a built-in classifier."
        ),
    ] = None
    python: Annotated[
        str | None,
        _doc(
            "The interpreter that runs `program`, and is `python` in `command`. Default: the first "
            "`python` on the PATH of `muster submit` or `muster run`. Over REST and on Kubernetes: "
            "the one that runs the agent of the rank's host, in a container the image's own; if "
            "`env` sets PATH, the first there."
        ),
    ] = None
    gpus_per_rank: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="GPUs that each rank of a command has for itself: CUDA_VISIBLE_DEVICES "
            "names them, and no other job with this field gets them meanwhile. Such a job keeps no "
            "spare processes. 0: all ranks see all GPUs, as scripts for torchrun expect.",
        ),
    ] = 0
    vram_mb: Annotated[
        Megabytes | None,
        _doc(
            "MB of GPU memory that each rank needs, of one GPU or of each of its gpus_per_rank. It "
            "is reserved before the rank starts, and CUDA_VISIBLE_DEVICES names that GPU. Needs "
            "MUSTER_CLUSTER; `muster plan` shows where the ranks fit."
        ),
    ] = None
    vram_wait_seconds: Annotated[
        _Seconds,
        _doc("Seconds that a rank may wait for its vram_mb on a host before the job fails."),
    ] = 3600.0
    ram_mb: Annotated[
        Megabytes | None, _doc("MB of main memory that each rank needs. Needs MUSTER_CLUSTER.")
    ] = None
    hosts: Annotated[
        tuple[NodeName, ...] | None,
        Meta(
            description="Names of the nodes where ranks may run. Needs MUSTER_CLUSTER. Default: "
            "all nodes.",
            extra={"wanted": 'a list of nodes, such as ["gpu-box"]'},
        ),
    ] = None
    engine: Annotated[
        Engine | None,
        _doc(
            "What starts the agents: local on this machine, ssh on the nodes of MUSTER_CLUSTER, "
            "slurm and kubernetes where these have room. Default: all machines that the service "
            "knows."
        ),
    ] = None
    engine_options: Annotated[
        dict[str, Any],
        Meta(
            description="What each job of the scheduler asks for, such as partition and time, or "
            "image; see docs/engines.md.",
            examples=[{"partition": "gpu", "ranks_per_host": 4}],
        ),
    ] = {}
    env: Annotated[dict[str, str], _doc("Environment of every rank.")] = {}
    secrets: Annotated[
        dict[str, str],
        Meta(
            description="More variables, by reference: env:NAME from the service's environment, or "
            "file:NAME from its directory of secrets. Only the ranks see the values.",
            examples=[{"HF_TOKEN": "file:hf-token"}],
        ),
    ] = {}
    working_dir: Annotated[
        str | None, _doc("Where the ranks start. Default: the server's own directory.")
    ] = None
    heartbeat_timeout: Annotated[
        _Seconds, _doc("Seconds without a heartbeat after which a rank is replaced.")
    ] = 10.0
    start_grace_seconds: Annotated[
        _Seconds, _doc("Seconds a rank may take from its start to its first heartbeat.")
    ] = 120.0
    stop_grace_seconds: Annotated[
        float, Meta(ge=0, le=SECONDS_LIMIT, description="Seconds from SIGTERM to SIGKILL.")
    ] = 30.0
    exit_grace_seconds: Annotated[
        _Seconds,
        _doc(
            "Seconds a rank may take to exit by itself, such as for exit handlers that upload "
            "results. A rank that was asked to stop has what is left of `stop_grace_seconds`."
        ),
    ] = 600.0
    progress_timeout_seconds: Annotated[
        _Seconds | None,
        _doc(
            "Seconds without a new step after which a rank is replaced, unless it "
            "waits for another rank. Default: never."
        ),
    ] = None
    restart_scope: Annotated[
        RestartScope,
        _doc(
            "What restarts when a rank of a command dies: that rank, or the whole gang "
            "with a new MASTER_PORT. Use gang where a process group cannot take in a new member, "
            "as in torch.distributed."
        ),
    ] = "rank"
    max_restarts: Annotated[
        _Budget, _doc("Restarts of one rank after crashes before the job fails.")
    ] = 50
    max_kills: Annotated[
        _Budget, _doc("Restarts of one rank that was killed from outside (SIGKILL).")
    ] = 1000
    max_hangs: Annotated[_Budget, _doc("Restarts of one rank that hung.")] = 20
    max_out_of_memory: Annotated[_Budget, _doc("Restarts of one rank that ran out of memory.")] = 5
    max_preemptions: Annotated[
        _Budget, _doc("Restarts of one rank that was stopped from outside (SIGTERM).")
    ] = 1000
    max_fruitless: Annotated[
        _Count,
        _doc(
            "Failures of one rank in a row without progress: a new checkpoint, or a new step of a "
            "synchronous job. SIGKILL does not count."
        ),
    ] = 5
    max_log_bytes: Annotated[
        int,
        Meta(
            ge=1 << 20,
            le=1 << 40,
            description="Disk space for the logs of the job. Beyond it the oldest lines are "
            "discarded: those of ended attempts first.",
        ),
    ] = 10 << 30
    resume_from: Annotated[
        Annotated[str, Meta(pattern=RESUME_PATTERN, extra={"wanted": RESUME_WANTED})]
        | ResumeFrom
        | None,
        _doc(
            "Id (no name) of the job whose newest checkpoint this one starts from; or its own id. "
            'JOB:STEP or {"job": JOB, "step": STEP}: the one of that step, or best (keep_best).'
        ),
    ] = None
    labels: Annotated[dict[str, str], _doc("For people and their tools.")] = {}

    @property
    def needs_majority(self) -> bool:
        """Whether two parts of a divided cluster must not both run it.

        Ranks that train together reach the same bits in each.
        """
        return self.mode != "synchronous" or self.bits == "any"

    @property
    def earlier(self) -> ResumeFrom | None:
        """What `resume_from` means."""
        return None if self.resume_from is None else ResumeFrom.parse(f"{self.resume_from}")

    @property
    def is_code_bound(self) -> bool:
        """True if no rank may have other code than the job."""
        return self.mode == "synchronous" and self.code != "any"

    @property
    def effective_batch_size(self) -> int:
        """The samples of a step: the requested number, or the default of the mode."""
        if self.batch_size is not None:
            return self.batch_size
        if self.mode == "independent":
            return INDEPENDENT_BATCH_SIZE
        return max(SYNCHRONOUS_BATCH_SIZE, SAMPLES_PER_SHARD_MIN * self.virtual_shards)

    @property
    def effective_compression_groups(self) -> int | None:
        """How many groups there are; None without compression."""
        if self.compression is None:
            return None
        return self.compression_groups or min(COMPRESSION_GROUPS, self.virtual_shards)

    @property
    def effective_backend(self) -> str:
        """The transport of this job: shared memory for "auto", as all ranks are on one host."""
        return "shared_memory" if self.backend == "auto" else self.backend

    @property
    def scheduler_options(self) -> SlurmOptions | KubernetesOptions | None:
        """What to ask a scheduler for; None if the service chooses the machines."""
        kind = SCHEDULERS.get(self.engine or "")
        return None if kind is None else msgspec.convert(self.engine_options, kind)

    @property
    def scheduled_hosts(self) -> tuple[str, ...]:
        """The hosts of a job for which a scheduler chooses machines; empty for any other job."""
        options = self.scheduler_options
        if options is None or self.engine is None:
            return ()
        return scheduled_hosts(self.engine, self.largest_world_size, options.ranks_per_host)

    @property
    def gpu_count(self) -> int:
        """How many GPUs each rank uses: its own, or a share of one."""
        return self.gpus_per_rank or int(self.vram_mb is not None)

    @property
    def device_type(self) -> str:
        """What a rank computes on: `cuda` or `cpu`."""
        return "cuda" if self.gpu_count else "cpu"

    @property
    def left_to_script(self) -> frozenset[str]:
        """The fields that a script with `muster.torch` sets: those that may have been left out."""
        if self.mode == "independent" or self.command is None:
            return frozenset()
        default, own = JobSpec(), ("batch_size", "epochs", "seed", "compression")
        return frozenset(name for name in own if getattr(self, name) == getattr(default, name))

    @property
    def largest_world_size(self) -> int:
        """The most ranks the job may ever have; an independent job keeps its number."""
        if self.mode == "independent" or self.max_workers is None:
            return self.world_size
        return self.max_workers


class JobRequest(JobSpec, frozen=True, kw_only=True):
    """A job to run. Every field has a default: ``{"world_size": 4}`` is enough.

    Paths are absolute, or relative to the directory in which the server was started. The server
    does not expand ``~``.
    """

    job_id: Annotated[
        Annotated[str, Meta(pattern=f"^{JOB_ID_PATTERN}$")] | None,
        Meta(
            description="Chosen by you, or generated. Free again after a delete.",
            extra={"wanted": JOB_ID_WANTED},
        ),
    ] = None
    mode: Annotated[
        Mode | None, _doc(f"{_MODE_MEANING} Default: independent with a command, else synchronous.")
    ] = None  # type: ignore[assignment]  # None only in a request: `spec` resolves it

    checkpoint_every: Annotated[CheckpointEvery | None, _EVERY_MEANING] = None  # type: ignore[assignment]  # as above

    def spec(self) -> JobSpec:
        """Return the requested job, with the fields resolved whose defaults depend on others."""
        fields = {name: getattr(self, name) for name in JobSpec.__struct_fields__}
        # Muster does not manage the training of a command, whose steps may take any time.
        is_command = self.command is not None
        mode = self.mode or ("independent" if is_command else "synchronous")
        every: CheckpointEvery | None = self.checkpoint_every
        if every is None:
            is_script = is_command and mode == "synchronous"
            every = "auto" if is_script else JobSpec().checkpoint_every
        return JobSpec(**fields | {"mode": mode, "checkpoint_every": every})
