"""What a dry run shows of an engine's request is what the engine gets."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from coordinator.launchers.slurm import Slurm
from muster.cluster.description import Cluster, ClusterNode, cluster_of_service
from muster.cluster.requests import planned_request, pod
from muster.contracts.job.engine import agent_job_name
from muster.contracts.job.spec import JobSpec
from muster.contracts.messages.assignment import AgentAssignment, CoordinatorAddress
from muster.contracts.messages.attach import JoinOrder, LaunchAgent
from muster.contracts.settings.services import ServiceSettings
from muster.contracts.views.job import AgentRequest
from muster.host.processes import module_command

SETTINGS = ServiceSettings.read({"HOME": "/h", "MUSTER_AGENT_ADDRESS": "10.0.0.1:7400"}, cores=4)
CLUSTER = Cluster(
    nodes=(
        ClusterNode(name="box", host="10.0.0.2", transport="ssh", user="ada", slots=4),
        ClusterNode(name="here", host="10.0.0.1", slots=4),
    )
)
ALONE = cluster_of_service(None, "n-0123456789ab", slots=4)
PLACES = {"dataset_dir": "/data", "checkpoint_dir": "/saved"}
RECORDER = '#!/bin/sh\nfor word; do echo "$word"; done > {0}/words\ncat > {0}/script\necho 7\n'


def planned(spec: JobSpec, cluster: Cluster = ALONE) -> AgentRequest:
    return planned_request("mine", spec, SETTINGS, cluster, module_command)


def filled_in(text: str) -> str:
    for placeholder, value in {
        "<uid>": "u",
        "<token>": "t",
        '"<address>","port":0': '"10.0.0.1","port":7400',
    }.items():
        text = text.replace(placeholder, value)
    return text


def order(host: str) -> JoinOrder:
    address = CoordinatorAddress(host="10.0.0.1", port=7400)
    return JoinOrder(job_uid="u", host=host, agent_number=1, token="t", coordinator=address)  # noqa: S106


def test_slurm_gets_what_was_shown(tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(RECORDER.format(tmp_path))
    sbatch.chmod(0o700)
    spec = JobSpec(engine="slurm", engine_options={"partition": "gpu", "mem": "8G"}, **PLACES)
    shown = planned(spec)
    scheduler = Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    asyncio.run(scheduler.submit(agent_job_name("u", "slurm-1", 1), order("slurm-1"), spec))
    assert shown.command is not None
    words = [filled_in(word) for word in shown.command]
    assert words == ["sbatch", *(tmp_path / "words").read_text().splitlines()]
    assert filled_in(str(shown.content)) == (tmp_path / "script").read_text()


def test_kubernetes_gets_what_was_shown() -> None:
    spec = JobSpec(engine="kubernetes", engine_options={"image": "mine:1"}, **PLACES)
    shown = planned(spec)
    given = pod(agent_job_name("u", "kubernetes-1", 1), order("kubernetes-1"), spec)
    inner = msgspec.json.encode(given).decode().replace("\\", "")
    assert filled_in(msgspec.json.encode(shown.content).decode().replace("\\", "")) == inner
    assert (shown.engine, shown.command) == ("kubernetes", None)


@pytest.mark.parametrize(
    ("fields", "cluster", "engine", "host"),
    [
        ({}, ALONE, "local", "n-0123456789ab"),
        ({}, CLUSTER, "ssh", "box"),
        ({"hosts": ("here",)}, CLUSTER, "local", "here"),
        ({"engine": "local"}, CLUSTER, "local", "here"),
    ],
)
def test_an_assignment_is_shown_without_secrets(
    fields: dict[str, object], cluster: Cluster, engine: str, host: str
) -> None:
    secrets = {"A": "env:LENT", "B": "file:kept"}
    places = PLACES | {"checkpoint_dir": "s3://bucket/saved"}
    shown = planned(JobSpec(secrets=secrets, **places, **fields), cluster)
    assert shown.engine == engine
    content, words = shown.content, " ".join(shown.command or ())
    if engine == "ssh":
        assert words.startswith("ssh -o BatchMode=yes")
        assert "-l ada -- 10.0.0.2" in words
        content = msgspec.to_builtins(msgspec.convert(content, LaunchAgent).assignment)
    assignment = msgspec.convert(content, AgentAssignment)
    shared = {"LENT"} if engine == "local" else {"LENT", "file:kept"}
    assert (assignment.host, assignment.shared_env.keys()) == (host, shared)
    assert {*assignment.shared_env.values(), *(assignment.store_keys or {}).values()} == {
        "<secret>"
    }
    assert assignment.is_remote == (engine == "ssh")
