"""A stored job as fields, as a job file and as a command, each of which makes the same job."""

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from api.page.submission import FIELDS, controls, fields_of, job_text, submit_command
from cli.jobs.submit import JobDescription
from muster.contracts.job.field_types import KeepBest
from muster.contracts.job.spec import JobRequest, JobSpec
from muster.host.yaml_files import YamlFile, safe_yaml

SCRIPT = ("python", "train.py", "it's", 'a "word"\n', "")
SPECS = [
    JobRequest().spec(),
    JobRequest(mode="independent", name="<b>\u202e é", world_size=1).spec(),
    JobRequest(program="a.py:A", seed=2**63 - 1, checkpoint_every="auto", epochs=3).spec(),
    JobRequest(command=SCRIPT, python="/usr/bin/python3", working_dir="/tmp").spec(),  # noqa: S108
    JobRequest(command=SCRIPT, mode="synchronous", checkpoint_every=5, working_dir="/").spec(),
    JobRequest(resume_from="a:7").spec(),
    JobRequest(
        command=SCRIPT,
        mode="synchronous",
        working_dir="/",
        keep_best=KeepBest("hits", "max"),
    ).spec(),
    JobRequest(command=("true",), name="null", labels={"a": "1"}, working_dir="/").spec(),
]


def made_of(fields: dict[str, Any]) -> JobSpec:
    return msgspec.convert(fields, JobRequest).spec()


@pytest.mark.parametrize("spec", SPECS)
def test_fields_make_the_same_job(spec: JobSpec) -> None:
    fields = fields_of(msgspec.to_builtins(spec))
    assert made_of(fields) == spec
    assert made_of(YamlFile.parse(job_text(fields), "job").content) == spec


@pytest.mark.parametrize("spec", SPECS)
def test_the_command_makes_the_same_job(spec: JobSpec) -> None:
    words = shlex.split(submit_command(fields_of(msgspec.to_builtins(spec))))
    assert words[:2] == ["muster", "submit"]
    assert set(words[2::2]) == {"--set"}
    pairs = [word.partition("=") for word in words[3::2]]
    typed = {name: safe_yaml().load(text) for name, _, text in pairs}
    body = JobDescription(file=None, typed=typed, mappings={}).body(Path("/"))
    assert made_of({**body, "working_dir": spec.working_dir}) == spec


def test_each_control_is_of_a_field() -> None:
    found = {control["name"]: control for control in controls()}
    assert tuple(found) == FIELDS
    kinds = {name: found[name]["kind"] for name in ("name", "world_size", "command")}
    assert kinds == {"name": "text", "world_size": "number", "command": "words"}
    assert found["mode"]["options"] == ["independent", "synchronous"]
