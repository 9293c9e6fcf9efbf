"""REST views of jobs, of their workers, and of what was done to them."""

from statistics import fmean
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from muster.contracts.agent import AgentState
from muster.contracts.job.engine import Engine
from muster.contracts.job.status import JobStatus
from muster.contracts.rank import RankProgress
from muster.contracts.views.view import Bits, Moment, View, doc

_WorkerId: TypeAlias = Annotated[
    str | None, doc("Never used twice; an independent rank's number. null: not in the pool yet.")
]
_WorkerState: TypeAlias = Annotated[
    str | None, doc("syncing, active, draining, failed or left; an independent rank's `process`.")
]
_Attempt: TypeAlias = Annotated[int | None, doc("Number of the process; null before the first.")]
_Process: TypeAlias = Annotated[
    str | None, doc("spawned, live, suspect, exiting, exited, finished or waiting; null: replaced.")
]
_Pid: TypeAlias = Annotated[int | None, doc("null unless the process lives")]

WAITING: Final = "waiting"
"""The process of a rank before its first one."""

FINISHED: Final = "finished"
"""The process of a rank that has nothing left to do."""


class _JobHeading(View, frozen=True, kw_only=True):
    job_id: str
    name: str | None
    status: Annotated[str, Meta(extra_json_schema={"enum": [str(word) for word in JobStatus]})]
    reason: Annotated[str | None, doc("Why, for machines. New words may come.")]
    message: Annotated[str | None, doc("Why, in one sentence.")]
    world_size: Annotated[int, doc("Number of ranks that is wanted now.")]
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None


class JobView(_JobHeading, frozen=True, kw_only=True):
    """A job at the time of the request."""

    job_uid: Annotated[str, doc("Unique forever; the id may be used again.")]
    exit_code: int | None
    is_terminal: bool
    stop_requested: bool
    pause_requested: bool
    checkpoint_requested: Annotated[
        bool, doc("A checkpoint was requested and is not durable yet.")
    ] = False
    spec: Annotated[
        dict[str, Any],
        doc(
            "Everything that was requested, with defaults. A token of scope read sees the names "
            "in `env` without their values."
        ),
    ]


class JobList(View, frozen=True, kw_only=True):
    jobs: list[JobView]


class AgentRequest(View, frozen=True, kw_only=True):
    """What an engine gets to start an agent; secrets, and what only a start knows, are <words>."""

    engine: Engine
    command: Annotated[
        list[str] | None, doc("What the coordinator runs; null: a request to the API.")
    ]
    content: Annotated[str | dict[str, Any], doc("What it reads; of Kubernetes, the Pod.")]


class JobPlan(View, frozen=True, kw_only=True):
    """The job that a submission would create."""

    job_id: Annotated[str, doc("The requested id, or one like the job would get.")]
    message: Annotated[
        str | None, doc("Remarks about default paths and about whether the command will run.")
    ]
    launcher: Annotated[str, doc("The engine that starts the agents, which start the ranks.")]
    request: Annotated[AgentRequest, doc("What it gets for the first agent.")]
    world_size: int
    command: Annotated[list[str] | None, doc("What every rank becomes; null: `program`.")]
    program: Annotated[str | None, doc("What is trained; null: the built-in classifier.")]
    shards: Annotated[
        int | None,
        doc(
            "Shards of the data set, in synchronous mode virtual shards of a step; null with a "
            "command."
        ),
    ]
    shards_per_rank: Annotated[list[int] | None, doc("How many of them each rank gets.")]
    spec: Annotated[dict[str, Any], doc("Everything that was requested, with defaults.")]


class WorkerView(View, RankProgress, frozen=True, kw_only=True):
    """One rank: its worker and process, its place in the data and its counters."""

    worker_id: _WorkerId
    rank: int
    state: _WorkerState
    attempt: _Attempt
    process: _Process
    pid: _Pid
    node: str | None
    throughput_steps_per_sec: float
    checkpoints_saved: int
    restarts: int
    endings: Annotated[dict[str, int], doc("Number of its processes per kind of exit.")]
    last_heartbeat_age_seconds: float | None
    exit_code: int | None
    exit_signal: int | None


class SummaryView(_JobHeading, frozen=True, kw_only=True):
    """Progress of a job and of each rank. Unknown numbers are null, never NaN."""

    step: Annotated[
        int,
        doc(
            "Steps done: those of the model if the ranks train one (synchronous mode, a gang, a "
            "command whose ranks have equally many to do), else the sum over the ranks."
        ),
    ]
    total_steps: Annotated[int | None, doc("Steps to do, counted in the same way.")]
    throughput_steps_per_sec: float
    eta_seconds: Annotated[float | None, doc("Until the slowest rank is done.")]
    loss: Annotated[float | None, doc("Mean of the last losses of the ranks.")]
    bits: Bits = "same"
    checkpoints_saved: int
    last_checkpoint_step: Annotated[int | None, doc("The newest of any rank.")]
    restarts: int
    endings: Annotated[dict[str, int], doc("Number of processes per kind of exit; see /attempts.")]
    workers: list[WorkerView]

    @property
    def living(self) -> int:
        """How many ranks have a process."""
        return sum(worker.pid is not None for worker in self.workers)

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of what the ranks reported last, by name: often only some report one.

        Where they train one model, a rank whose number is of an earlier step does not count:
        another one has reported since.
        """
        found: dict[str, tuple[int, list[float]]] = {}
        for worker in self.workers:
            for name, value in worker.metrics.items():
                step = worker.metric_steps.get(name, 0)
                newest, values = found.get(name, (step, []))
                if step >= newest:
                    found[name] = step, [*values, value] if step == newest else [value]
        return {name: fmean(values) for name, (_, values) in found.items()}


class SummaryList(View, frozen=True, kw_only=True):
    jobs: list[SummaryView]


class LeaderboardRow(View, frozen=True, kw_only=True):
    """One job of a sweep."""

    job_id: str
    status: str
    loss: Annotated[float | None, doc("The one that decides, as last reported.")]
    step: int
    total_steps: int | None
    differences: Annotated[dict[str, Any], doc("Fields, `env.NAME` and options that differ.")]


class LeaderboardView(View, frozen=True, kw_only=True):
    """The jobs with one value of the label `sweep`, the best first."""

    sweep: Annotated[str | None, doc("null: there is none, or several to choose from.")]
    sweeps: Annotated[list[str], doc("All there are.")]
    loss_kind: Annotated[Literal["validation", "training"], doc("What all are compared by.")]
    metric: Annotated[str | None, doc("That of keep_best, if it decides; `loss` has it.")] = None
    best: Annotated[str | None, doc("Its id; null: no job that did not fail has a loss.")]
    jobs: list[LeaderboardRow]


class MemberView(View, frozen=True, kw_only=True):
    """A worker of a job's pool, living or gone; of an independent job, one of its ranks."""

    worker_id: _WorkerId
    rank: int
    state: _WorkerState
    attempt: _Attempt
    process: _Process
    pid: _Pid
    node: str | None
    gpu_count: int
    backend: Annotated[str | None, doc("What it computes on: cpu or cuda.")]
    transport: Annotated[str | None, doc("To its peers; null for an independent rank.")] = None
    joined_at: Moment | None
    joined_step: Annotated[int | None, doc("null before it is active")]
    last_heartbeat_age_seconds: float | None
    step: Annotated[int | None, doc("null once another process has its rank")]


class AgentView(View, frozen=True, kw_only=True):
    """The parent of a job's ranks on one host."""

    host: str
    state: Annotated[AgentState, doc("What the coordinator knows of it.")]


class MemberList(View, frozen=True, kw_only=True):
    job_id: str
    world_size: Annotated[int, doc("Number of ranks that is wanted now.")]
    active: Annotated[int, doc("Number of workers that take part in every step.")]
    is_changing: Annotated[
        bool, doc("Workers are joining or leaving, or others are active than are wanted.")
    ]
    agents: Annotated[list[AgentView], doc("One for each host that has, or had, ranks.")]
    workers: list[MemberView]


class Deleted(View, frozen=True, kw_only=True):
    job_id: str
    deleted: bool
    logs_deleted: bool
    checkpoints_deleted: bool
    checkpoints_left: Annotated[bool, doc("It saved some, and they stay.")] = False


class NotDeleted(View, frozen=True, kw_only=True):
    job_id: str
    detail: Annotated[str, doc("Why, and what to do about it.")]


class Purged(View, frozen=True, kw_only=True):
    matched: int
    deleted: int
    job_ids: Annotated[list[str], doc("Deleted jobs; in a dry run, jobs it would delete.")]
    skipped: Annotated[list[str], doc("Matching jobs that are not over.")]
    failed: Annotated[list[NotDeleted], doc("Jobs that are over but could not be deleted.")] = []  # noqa: RUF012  msgspec copies it
    freed_bytes: Annotated[int, doc("Size of the files of the deleted jobs.")] = 0
