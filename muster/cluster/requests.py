"""What an engine gets to start an agent, as pure functions: a dry run shows the very same.

In a dry run, what only a start knows and every secret is a word in angle brackets.
"""

import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from muster.cluster.description import Cluster, ClusterNode
from muster.contracts.job.engine import (
    KubernetesOptions,
    SlurmOptions,
    agent_job_name,
)
from muster.contracts.job.secrets import Reference
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId
from muster.contracts.location import parse_location
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress, VramNeed
from muster.contracts.messages.attach import JOIN_ORDER, JoinOrder, LaunchAgent, ProbeFile
from muster.contracts.settings.environ import agent_heartbeat_seconds
from muster.contracts.settings.names import STORE_KEYS
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from muster.contracts.views.job import AgentRequest

REMOTE_ORPHAN_SECONDS: Final = 20.0
REMOTE_GRACE_SECONDS: Final = 5.0

NOTICE_SECONDS: Final = 60
"""How long before the end of its time an agent gets a signal, so that its ranks save."""

NAME: Final = "muster/agent"  # the annotation with the whole name of a job
LABELS: Final = {
    "app.kubernetes.io/managed-by": "muster",
    "app.kubernetes.io/component": "agent",
}
NAME_LIMIT: Final = 63  # of a Pod that is to have a host name
GRACE_SECONDS: Final = 60  # in which ranks save

SSH: Final = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),  # never asks for a password
    # A dead connection ends after about 6 s of silence.
    *("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3"),
    # The user's own are for the user's own sessions, which may have their ports already.
    *("-o", "ClearAllForwardings=yes", "-o", "ControlPersist=no"),
)

SECRET: Final = "<secret>"  # noqa: S105  stands for one
TOKEN: Final = "<token>"  # noqa: S105  as above
ADDRESS: Final = CoordinatorAddress(host="<address>", port=0)


def planned_request(
    job_id: str,
    spec: JobSpec,
    settings: ServiceSettings,
    cluster: Cluster,
    command: Callable[[str], list[str]],
) -> AgentRequest:
    """Return what the engine of a job would get first; `command` is how it runs our modules."""
    usable = (node for node in cluster.nodes if spec.engine in {None, node.transport})
    named = (node for node in usable if node.name in (spec.hosts or [node.name]))
    node = next(named, cluster.nodes[0])  # a scheduler chooses machines of its own
    engine = spec.engine or node.transport
    order = JoinOrder(
        job_uid="<uid>",
        host=next(iter(spec.scheduled_hosts), node.name),
        agent_number=1,
        token=TOKEN,
        coordinator=None if engine == "local" else ADDRESS,
    )
    name = agent_job_name(order.job_uid, order.host, order.agent_number)
    if engine == "kubernetes":
        return AgentRequest(engine=engine, command=None, content=pod(name, order, spec))
    if engine == "slurm":
        script = sbatch_script(order, command("worker.join"))
        return AgentRequest(engine=engine, command=sbatch_words(name, spec), content=script)
    is_local = engine == "local"
    assignment = with_secrets(
        assignment_of(order, job_id, spec, settings, is_local=is_local),
        # A local agent reads the files itself.
        lambda ref: SECRET if ref.source == "env" or not is_local else None,
        dict.fromkeys(STORE_KEYS, SECRET),
    )
    if is_local:
        content = msgspec.to_builtins(assignment)
        return AgentRequest(engine=engine, command=command("worker.agent"), content=content)
    probe = None
    if place := assignment.checkpoint_dir:
        probe = ProbeFile(directory=place, name=f".muster-probe-{TOKEN}", content=TOKEN)
    launch = LaunchAgent(assignment=assignment, probe=probe)
    words = command("worker.attach")  # which a node of the household runs by itself
    if engine == "ssh":
        words = [*SSH, *login_words(node), shlex.join(words)]
    return AgentRequest(engine=engine, command=words, content=msgspec.to_builtins(launch))


def with_secrets(
    assignment: AgentAssignment,
    value_of: Callable[[Reference], str | None],
    store_keys: Mapping[str, str],
) -> AgentAssignment:
    """Return the assignment with the values that its agent alone may have."""
    found = [ref for ref in map(Reference.parse, assignment.secrets.values()) if ref]
    names = {ref.name if ref.source == "env" else str(ref): value_of(ref) for ref in found}
    shared = {name: value for name, value in names.items() if value is not None}
    keys = None if assignment.store_keys is None else dict(store_keys)
    return replace(assignment, shared_env=shared, store_keys=keys)


def assignment_of(
    order: JoinOrder, job_id: str, spec: JobSpec, settings: ServiceSettings, *, is_local: bool
) -> AgentAssignment:
    """Return the assignment of a job's agent, as far as it follows from the job.

    It has no GPUs, variables and processes of its host yet, and no secrets.
    """
    data, is_synchronous = DataDir(settings.data_dir), spec.mode == "synchronous"
    orphan_seconds, grace_seconds = settings.orphan_timeout_seconds, spec.stop_grace_seconds
    # Another node of a household may lead next.
    stays_local = is_local and settings.nodes is None
    if not (stays_local or is_synchronous):
        # They are replaced after their lease, see `coordinator.decide.liveness`.
        orphan_seconds = min(orphan_seconds, REMOTE_ORPHAN_SECONDS)
        grace_seconds = min(grace_seconds, REMOTE_GRACE_SECONDS)
    places = [parse_location(place) for place in (spec.dataset_dir, spec.checkpoint_dir) if place]
    saves_to = places[-1] if spec.checkpoint_dir else None
    return AgentAssignment(
        **msgspec.structs.asdict(order),
        job_root=str(data.job(JobId(job_id)).root),
        address_file=str(data.coordinator_address),
        # Ranks are forked from the prefork server unless the user's variables may change how
        # Python or numpy start, or the next agent has to read secrets from the environment of
        # a process, where the kernel does not show those of a fork.
        is_managed=spec.command is None and not spec.env and not spec.secrets,
        orphan_timeout_seconds=orphan_seconds,
        stop_grace_seconds=grace_seconds,
        python=spec.python,
        agent_heartbeat_seconds=agent_heartbeat_seconds(spec),
        max_log_bytes=spec.max_log_bytes,
        spare_ranks=spec.spare_ranks if is_synchronous and not spec.gpu_count else 0,
        gpus_per_rank=spec.gpus_per_rank,
        gpus_at_once=spec.gpu_count,
        vram=VramNeed(vram_mb=spec.vram_mb, wait_seconds=spec.vram_wait_seconds, usable_mb={})
        if spec.vram_mb is not None
        else None,
        secrets=spec.secrets,
        secrets_dir=str(data.secrets),
        # The launcher adds the keys.
        store_keys=None if all(isinstance(place, Path) for place in places) else {},
        checkpoint_dir=str(saves_to) if isinstance(saves_to, Path) and not is_local else None,
    )


def login_words(node: ClusterNode) -> list[str]:
    """Return how ssh names the user and the host of a node."""
    return [*(() if node.user is None else ("-l", node.user)), "--", node.host]


def sbatch_words(name: str, spec: JobSpec) -> list[str]:
    """Return the command that submits the job of an agent."""
    options = spec.scheduler_options
    assert isinstance(options, SlurmOptions)  # noqa: S101  its engine is ours
    named = ("partition", "account", "qos", "constraint", "gres", "mem", "time")
    asked = [(option, getattr(options, option)) for option in named]
    return [
        "sbatch",
        "--parsable",
        f"--job-name={name}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={options.ranks_per_host * options.cpus_per_rank}",
        "--no-requeue",  # the next agent gets a job of its own
        "--output=/dev/null",  # agents send their logs themselves
        "--chdir=/",
        f"--signal=B:USR1@{NOTICE_SECONDS}",
        *(f"--{option}={value}" for option, value in asked if value is not None),
    ]


def sbatch_script(order: JoinOrder, join: Sequence[str]) -> str:
    """Return its script, which runs `join`. The order, with the token, is on no command line."""
    content = msgspec.json.encode(order).decode()
    return f"#!/bin/sh\nexec {shlex.join(join)} <<'ORDER'\n{content}\nORDER\n"


def pod_name(name: str) -> str:
    """Return the name of a Pod: that of its job, cut and made unique by a hash if it is long."""
    if len(name) <= NAME_LIMIT:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"{name[: NAME_LIMIT - 11]}-{digest}"


def pod(name: str, order: JoinOrder, spec: JobSpec) -> dict[str, Any]:
    """Return the Pod of an agent: without rights, and writable in its temporary directory only."""
    options = spec.scheduler_options
    assert isinstance(options, KubernetesOptions)  # noqa: S101  its engine is ours
    asked: dict[str, str] = {"cpu": str(options.ranks_per_host * options.cpus_per_rank)}
    asked |= {} if options.mem is None else {"memory": options.mem}
    limits = {"nvidia.com/gpu": str(options.gpus)} if options.gpus else {}
    limits |= {} if options.mem_limit is None else {"memory": options.mem_limit}
    volumes: dict[str, dict[str, Any]] = {
        "tmp": {"emptyDir": {}},
        "shm": {"emptyDir": {"medium": "Memory"}},
        "cache": {"emptyDir": {}},  # not every runtime makes the volumes that our image declares
    }
    mounts = {"tmp": "/tmp", "shm": "/dev/shm", "cache": "/var/cache/muster"}  # noqa: S108
    if options.claim is not None:
        volumes["data"] = {"persistentVolumeClaim": {"claimName": options.claim}}
        mounts["data"] = options.claim_path
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod_name(name), "labels": LABELS, "annotations": {NAME: name}},
        "spec": {
            "restartPolicy": "Never",  # the next agent gets a Pod of its own
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "nodeSelector": options.node_selector,
            "tolerations": list(options.tolerations),
            "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
            "priorityClassName": options.priority_class,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "agent",
                    "image": options.image,
                    "command": ["python", "-P", "-m", "muster", "worker.join"],
                    "env": [
                        {"name": JOIN_ORDER, "value": msgspec.json.encode(order).decode()},
                        {"name": "HOME", "value": "/tmp"},  # noqa: S108
                    ],
                    "resources": {"requests": asked, "limits": limits},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [
                        {"name": volume, "mountPath": path} for volume, path in mounts.items()
                    ],
                }
            ],
            "volumes": [{"name": volume, **source} for volume, source in volumes.items()],
        },
    }
