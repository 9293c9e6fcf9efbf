"""Defaults filled in, paths absolute, and what cannot run refused with its field."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from api.problems import Conflict, InvalidRequest
from api.requests import JobRequest
from api.submission import Submitter
from muster.contracts.environ import ServiceSettings
from muster.contracts.errors import InvalidSpec
from muster.contracts.layout import DataDirectory
from muster.contracts.spec import JobSpec


@pytest.fixture
def submitter(tmp_path: Path) -> Submitter:
    environment = {
        "CHECKPOINT_DIR": str(tmp_path / "ckpt"),
        "DATASET_DIR": str(tmp_path / "data"),
        "MUSTER_DATA_DIR": str(tmp_path / "state"),
    }
    return Submitter(
        settings=ServiceSettings.read(environment, cores=2),
        working_dir=tmp_path,
        clock=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        random_hex=lambda: "abcdef0123456789",
        checkpoint_dir_of={"before": str(tmp_path / "earlier")}.get,
        search_path="/usr/bin:/bin",
    )


def refusal(submitter: Submitter, **fields: object) -> str:
    """Return the field that is refused."""
    with pytest.raises(InvalidRequest) as refused:
        submitter.prepare(JobRequest.model_validate(fields))
    (error,) = refused.value.errors
    return str(error.loc[-1])


def test_a_made_id_sorts_by_time(submitter: Submitter) -> None:
    assert submitter.prepare(JobRequest()).job_id == "job-20260102t030405-xmxt0u"


def test_every_field_of_a_spec_can_be_asked_for() -> None:
    assert set(JobRequest.model_fields) == {"job_id", *JobSpec.__struct_fields__}
    asked = JobRequest().model_dump(exclude={"job_id"})
    defaults = {name: getattr(JobSpec(), name) for name in JobSpec.__struct_fields__}
    assert asked == defaults | {"mode": None}


def test_a_job_without_a_command_trains_on_all_ranks_together(submitter: Submitter) -> None:
    assert submitter.prepare(JobRequest()).spec.mode == "synchronous"
    assert submitter.prepare(JobRequest(command=["true"])).spec.mode == "independent"
    assert submitter.prepare(JobRequest(mode="independent")).spec.mode == "independent"


def test_relative_paths_are_the_servers(submitter: Submitter, tmp_path: Path) -> None:
    for name in ("mine", "work"):
        (tmp_path / name).mkdir()
    asked = JobRequest(dataset_dir="mine", working_dir="work", checkpoint_dir="saved")
    spec = submitter.prepare(asked).spec
    assert spec.dataset_dir == str(tmp_path / "mine")
    assert spec.working_dir == str(tmp_path / "work")
    assert spec.checkpoint_dir == str(tmp_path / "saved")


def test_a_job_that_needs_more_slots_than_there_are_says_when_it_starts(
    submitter: Submitter,
) -> None:
    assert submitter.settings.slots == 4
    assert submitter.prepare(JobRequest(command=["true"], world_size=4)).message is None
    assert submitter.prepare(JobRequest(command=["true"], world_size=100)).message == (
        "100 ranks are more than the 4 slots there are (MUSTER_SLOTS): all of them start together, "
        "when no other job runs"
    )


def test_without_any_data_set_the_job_says_what_will_be_used(submitter: Submitter) -> None:
    submission = submitter.prepare(JobRequest())
    assert submission.message is not None
    assert "synthetic" in submission.message
    assert submission.spec.dataset_dir == str(
        DataDirectory(submitter.settings.data_dir).synthetic_dataset
    )


def test_what_will_probably_not_run_is_said_of_the_job(submitter: Submitter) -> None:
    asked = {"env": {"HF_TOKEN": "hf_1"}, "command": ["sh", "train.py"]}
    told = submitter.prepare(JobRequest(**asked)).message
    shown = "env shows HF_TOKEN to whoever may submit jobs: secrets keeps it to the ranks"
    assert told == shown
    told = submitter.prepare(JobRequest(**asked | {"command": ["pyhton", "train.py"]})).message
    assert told == f"{shown}; command: pyhton is not found in PATH"


def test_a_default_data_set_that_cannot_be_read_is_refused(
    submitter: Submitter, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard_00000.txt").symlink_to(tmp_path / "gone")
    assert refusal(submitter) == "dataset_dir"


def test_paths_are_said_to_be_the_servers() -> None:
    assert "relative to the directory the server" in JobRequest.model_json_schema()["description"]


@pytest.mark.parametrize("field", ["working_dir", "dataset_dir", "checkpoint_dir"])
@pytest.mark.parametrize("path", ["a" * 300, "loop"])
def test_a_path_that_the_system_does_not_take_is_refused_with_its_field(
    submitter: Submitter, tmp_path: Path, field: str, path: str
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refusal(submitter, **{field: path}) == field


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
@pytest.mark.parametrize("field", ["working_dir", "dataset_dir", "checkpoint_dir"])
def test_a_directory_that_is_closed_to_us_is_refused_with_its_field(
    submitter: Submitter, tmp_path: Path, field: str
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    assert refusal(submitter, **{field: str(closed / "below")}) == field


@pytest.mark.parametrize(
    "fields",
    [
        {"dataset_dir": "nowhere"},
        {"working_dir": "nowhere"},
        {"resume_from": "nobody"},
        {"program": "nowhere.py:Net", "mode": "synchronous"},
        {"job_id": "summaries"},
    ],
)
def test_what_cannot_run_is_refused_with_its_field(
    submitter: Submitter, fields: dict[str, object]
) -> None:
    assert refusal(submitter, **fields) == next(iter(fields))


def test_a_program_is_looked_for_in_the_working_directory(
    submitter: Submitter, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").touch()
    for program in ("train.py:Net", "package.module:Net"):
        asked = JobRequest(mode="synchronous", program=program, working_dir="work")
        assert submitter.prepare(asked).spec.program == program
    asked = {"mode": "synchronous", "program": "train.py:Net"}
    assert refusal(submitter, **asked) == "program", "that is where the server was started"


def test_the_contract_has_the_last_word(submitter: Submitter) -> None:
    with pytest.raises(InvalidSpec):
        submitter.prepare(JobRequest(world_size=2, min_workers=3))


def test_leftovers_are_resumed_only_when_said_so(submitter: Submitter, tmp_path: Path) -> None:
    (tmp_path / "ckpt" / "a").mkdir(parents=True)
    (tmp_path / "ckpt" / "a" / ".FENCE.g0004.8d777f385d3dfec8").touch()
    submitter.prepare(JobRequest(job_id="a"))
    with pytest.raises(InvalidRequest, match="holds no checkpoints"):
        submitter.prepare(JobRequest(job_id="b", resume_from="a"))
    (tmp_path / "ckpt" / "a" / "LATEST").touch()
    with pytest.raises(Conflict, match="resume_from"):
        submitter.prepare(JobRequest(job_id="a"))
    submitter.prepare(JobRequest(job_id="a", resume_from="a"))
    submitter.prepare(JobRequest(job_id="b", resume_from="a"))


def test_a_job_goes_on_where_the_earlier_one_has_its_checkpoints(
    submitter: Submitter, tmp_path: Path
) -> None:
    (tmp_path / "earlier" / "before").mkdir(parents=True)
    with pytest.raises(InvalidRequest, match="holds no checkpoints"):
        submitter.prepare(JobRequest(resume_from="before"))
    (tmp_path / "earlier" / "before" / "LATEST").touch()
    spec = submitter.prepare(JobRequest(resume_from="before")).spec
    assert spec.checkpoint_dir == str(tmp_path / "earlier")


def test_a_refusal_to_resume_names_the_earlier_jobs_directory(
    submitter: Submitter, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        submitter.prepare(JobRequest(resume_from="before", checkpoint_dir="other"))
    (error,) = refused.value.errors
    assert error.msg == (
        f"{tmp_path}/other/before holds no checkpoints; those of job before are kept in "
        f"{tmp_path}/earlier/before: leave checkpoint_dir out to go on there"
    )


@pytest.mark.parametrize(
    ("mode", "left", "other"),
    [
        ("synchronous", "worker_0/step_0000000042.g0003", "independent"),
        ("independent", "step_0000000042.g0003", "synchronous"),
    ],
)
def test_checkpoints_of_another_mode_are_not_gone_on_from(
    submitter: Submitter, tmp_path: Path, mode: str, left: str, other: str
) -> None:
    (tmp_path / "ckpt" / "a" / left).mkdir(parents=True)
    for job_id in ("a", "b"):
        with pytest.raises(Conflict, match=f"give mode {other}, or begin"):
            submitter.prepare(JobRequest(job_id=job_id, mode=mode, resume_from="a"))
        submitter.prepare(JobRequest(job_id=job_id, mode=other, resume_from="a"))
