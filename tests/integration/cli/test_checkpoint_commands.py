"""``muster checkpoint``, from the command line to the files of a job."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from click.testing import Result

from cli.errors import ExitCode
from cli.services.record import ServiceRecord, service_lock, write_record
from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.manifest import BEST, LATEST, STATE
from muster.contracts.paths import DataDir
from muster.contracts.shards import Position
from muster.host.processes import this_process
from tests.support.api_service import Service, StandIn
from tests.support.checkpoint_ranks import Rank, owner
from tests.support.screens import Screen

Muster = Callable[..., Result]


@pytest.fixture
def saved(service: Service, client: httpx.Client, job: str) -> Path:
    """Three checkpoints of rank 0 of a job, and one of rank 1."""
    uid = client.get(f"/jobs/{job}").json()["job_uid"]
    directory = service.root / "checkpoints" / job
    for rank, steps in ((0, (1, 2, 3)), (1, (3,))):
        save(directory, uid, rank, *steps)
    return directory


def save(directory: Path, uid: str, rank: int, *steps: int) -> None:
    place = directory / f"worker_{rank}"
    whose = owner(job_id=directory.name, uid=uid, rank=rank)
    vault = Rank(LocalFileSystem(), whose, keep_last=3, directory=place)
    vault.save(*steps)
    vault.manager.close()


def damage(directory: Path, step: int) -> Path:
    [file] = directory.glob(f"worker_0/step_{step:010d}*/{STATE}")
    file.write_bytes(file.read_bytes()[:-1])
    return file


@pytest.mark.usefixtures("saved")
def test_ls_marks_current_and_damaged_checkpoints(muster: Muster, job: str, saved: Path) -> None:
    damage(saved, 3)
    lines = muster("checkpoint", "ls", job).stdout.splitlines()
    assert lines[0].split()[:4] == ["whose", "step", "epoch", "size"]
    rows = [(line.split()[1], line.split()[2], line.split()[-1]) for line in lines[1:]]
    assert rows == [
        ("0", "3", "damaged"),
        ("0", "2", "current"),
        ("0", "1", "intact"),
        ("1", "3", "current"),
    ]
    assert max(map(len, lines)) < 80
    told = json.loads(muster("checkpoint", "ls", str(saved), "-o", "json").stdout)
    assert [one["state"] for one in told] == [row[2] for row in rows]
    assert "does not match its hash" in told[0]["damage"]


@pytest.mark.usefixtures("saved")
def test_ls_reads_as_many_checkpoints_of_each_rank_as_asked(muster: Muster, job: str) -> None:
    lines = muster("checkpoint", "ls", "--last", "2", job).stdout.splitlines()
    steps = [(line.split()[1], line.split()[2]) for line in lines[1:]]
    assert steps == [("0", "3"), ("0", "2"), ("1", "3")]


def test_ls_shows_its_progress_on_a_terminal(saved: Path, tmp_path: Path) -> None:
    with Screen("checkpoint", "ls", str(saved), environment={}, directory=tmp_path) as screen:
        assert screen.end() == 0
    assert "reading  [" in screen.written


@pytest.mark.parametrize(
    ("option", "are_kept"), [("--force", True), ("--delete-checkpoints", False)]
)
def test_rm_keeps_checkpoints_unless_told(
    muster: Muster, stand_in: StandIn, job: str, saved: Path, option: str, *, are_kept: bool
) -> None:
    assert muster("rm", "--delete-checkpoints", job).exit_code == ExitCode.CONFLICT
    before = set(saved.rglob("*"))
    stand_in.end(job)
    assert muster("rm", option, job).exit_code == ExitCode.OK
    assert set(saved.rglob("*")) == (before if are_kept else set())


@pytest.fixture
def files(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataDir:
    """The data directory of the services, which run."""
    files = DataDir(tmp_path / "data")
    monkeypatch.setenv("MUSTER_DATA_DIR", str(files.root))
    files.root.mkdir(exist_ok=True)
    record = ServiceRecord(url=service.url, process=this_process(), log=None, is_ending=False)
    write_record(files, record)
    return files


@pytest.mark.usefixtures("files")
def test_checkpoints_are_deleted_once_no_job_needs_them(
    muster: Muster, stand_in: StandIn, job: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved / "notes").touch()
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("MUSTER_DATA_DIR", str(saved / "notes"))
        assert muster("checkpoint", "rm", str(saved)).exit_code == ExitCode.USAGE, "who knows?"
    refused = muster("checkpoint", "rm", job)
    assert (refused.exit_code, refused.stdout) == (ExitCode.CONFLICT, "")
    stand_in.end(job)
    words = ("--set", f"resume_from={job}", "--set", "mode=independent")
    submitted = muster("submit", "-d", *words)
    assert submitted.exit_code == ExitCode.OK, submitted.stderr
    assert muster("checkpoint", "rm", str(saved)).exit_code == ExitCode.CONFLICT
    stand_in.end(submitted.stdout.strip())
    of_rank = muster("checkpoint", "rm", str(saved / "worker_0"))
    assert of_rank.stdout == f"0 files of {saved / 'worker_0'} deleted\n", "it is no job's place"
    assert muster("checkpoint", "rm", str(saved)).stdout.endswith(f" files of {saved} deleted\n")
    assert [path.name for path in saved.rglob("*")] == ["notes"]


def test_gc_deletes_what_no_job_and_no_run_can_use(
    muster: Muster, files: DataDir, job: str
) -> None:
    for run in ("over", "later", "saved"):
        files.foreground(run).services_log.parent.mkdir(parents=True)
        files.foreground(run).services_log.write_text("it is over\n")
    for run in ("over", "saved"):
        files.foreground(run).ended.touch()
    for one in ("gone", "saved", job):
        save(files.checkpoints / one, f"uid of {one}", 0, 1)
    with service_lock(files.foreground("over")):  # as its command does, while it runs
        muster("gc", "--delete")
        assert files.foreground("over").ended.exists()
    save(files.checkpoints / "gone", "uid of gone", 0, 1)
    litter = [files.checkpoints / "gone", files.foreground("over").root]
    for words in (["gc"], ["gc", "--delete"]):
        listed = [line.split()[-1] for line in muster(*words).stdout.splitlines()]
        assert listed == [str(place) for place in litter]
    assert {path.name for path in files.checkpoints.iterdir()} == {"saved", job}
    assert {path.name for path in files.runs.iterdir()} == {"later", "saved"}
    assert muster("gc").stdout == ""


def test_verify_names_damaged_files(muster: Muster, job: str, saved: Path) -> None:
    assert muster("checkpoint", "verify", job).exit_code == 0
    file = damage(saved, 2)
    result = muster("checkpoint", "verify", job)
    assert result.exit_code == 1
    [line] = [line for line in result.stdout.splitlines() if "step 2" in line]
    assert str(file) in line
    assert muster("checkpoint", "verify", job, "-o", "name").stdout == f"{file.parent}\n"
    latest = saved / "worker_1" / LATEST
    latest.unlink()
    assert f"{latest} is missing or unreadable" in muster("checkpoint", "verify", job).stdout
    named = muster("checkpoint", "verify", job, "-o", "name")
    assert (named.exit_code, named.stdout) == (1, f"{file.parent}\n{latest}\n")


def test_show_prints_the_contents(muster: Muster, job: str, saved: Path) -> None:
    refused = muster("checkpoint", "show", job)
    assert refused.exit_code == 2
    assert "choose one with --rank" in refused.stderr
    lines = muster("checkpoint", "show", f"{job}:2", "--rank", "0").stdout.splitlines()
    assert lines[2].split() == ["step", "2,", "saved", "by", "generation", "0"]
    assert [line.split()[:4] for line in lines[-2:]] == [
        ["bias", "float64", "scalar", "8"],
        ["weights", "float32", "40", "160"],
    ]
    *_, newest_of_rank_1 = muster("checkpoint", "ls", job, "-o", "name").stdout.splitlines()
    told = json.loads(muster("checkpoint", "show", f"{saved}/worker_1", "-o", "json").stdout)
    assert told == json.loads(muster("checkpoint", "show", newest_of_rank_1, "-o", "json").stdout)
    digest = muster("digest", job).stdout.splitlines()
    assert digest[1] == f"{told['sha256']}  rank 1, step 3"
    again = json.loads(muster("digest", job, "-o", "json").stdout)
    assert again[1] == {"whose": "rank 1", "step": 3, "sha256": told["sha256"]}


@pytest.mark.usefixtures("saved")
def test_diff_compares_bits(muster: Muster, job: str) -> None:
    same = muster("checkpoint", "diff", f"{job}:2", f"{job}:2", "--rank", "0")
    assert (same.exit_code, same.stdout.startswith("equal bits")) == (0, True)
    other = muster("checkpoint", "diff", f"{job}:1", job, "--rank", "0")
    assert other.exit_code == 1
    rows = {line.split()[0]: line.split() for line in other.stdout.splitlines()[1:]}
    assert rows["weights"][-2:] == ["40", "2"]
    assert rows["position.step"] == ["position.step", "1", "3", "-", "-"]
    told = json.loads(
        muster("checkpoint", "diff", f"{job}:1", job, "--rank", "0", "-o", "json").stdout
    )
    assert not told["equal"]


def test_diff_compares_each_rank_with_itself(muster: Muster, job: str, saved: Path) -> None:
    same = muster("checkpoint", "diff", job, f"{saved}/")
    assert (same.exit_code, "entries of 2 ranks" in same.stdout) == (0, True)
    other = saved.parent / "other"
    save(other, "other", 0, 3)
    save(other, "other", 1, 4)
    differing = muster("checkpoint", "diff", job, f"{other}/", "-o", "name")
    assert {name.split(":")[0] for name in differing.stdout.splitlines()} == {"rank 1"}


def test_the_best_checkpoint_is_marked_and_exported(
    muster: Muster, service: Service, client: httpx.Client, stand_in: StandIn, tmp_path: Path
) -> None:
    request = {"command": ["true"], "mode": "synchronous", "keep_best": {"metric": "m"}}
    made = client.post("/jobs", json=request).json()
    job, place = made["job_id"], service.root / "checkpoints" / made["job_id"]
    whose = owner(job_id=job, uid=made["job_uid"], rank=0)
    manager = Rank(LocalFileSystem(), whose, keep_last=2, directory=place).manager
    for step, best in enumerate([{BEST: 0.5}, {BEST: 0.25}, {}, {}]):
        manager.save(step, Position(step=step), {"at": np.full(1, step), **best})
    lines = muster("checkpoint", "ls", job).stdout.splitlines()
    states = [line.split("  ")[-1].strip() for line in lines[1:]]
    assert states == ["current", "intact", "intact, best"]
    target = tmp_path / "best.npz"
    for words in ((job, "--best"), (f"{job}:best",), (f"{place}:best",)):
        assert muster("checkpoint", "export", words[0], str(target), *words[1:]).exit_code == 0
        assert np.load(target)["at"] == 1
        target.unlink()
    refused = muster("checkpoint", "export", f"{job}:2", str(target), "--best")
    assert (refused.exit_code, "leave out its step" in refused.stderr) == (ExitCode.USAGE, True)
    page = client.get(f"/ui/jobs/{job}/checkpoints").text
    assert re.findall(r"submit\?resume_from=([^\"]*)", page) == [job, f"{job}:2", f"{job}:1"]
    assert f"resume_from: \u0026#34;{job}:1" in client.get(f"/ui/submit?resume_from={job}:1").text
    stand_in.end(job)
    client.delete(f"/jobs/{job}").raise_for_status()


@pytest.mark.usefixtures("saved")
def test_export_does_not_overwrite(muster: Muster, job: str, tmp_path: Path) -> None:
    words = ("checkpoint", "export", job, "model.npz", "--rank", "1")
    result = muster(*words)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "the file model.npz holds 2 arrays of step 3\n"
    with np.load(tmp_path / "model.npz") as found:
        assert found["weights"][0] == 3
    assert muster(*words).exit_code == 1


@pytest.mark.usefixtures("saved")
def test_export_refuses_an_unknown_format(muster: Muster, job: str, tmp_path: Path) -> None:
    result = muster("checkpoint", "export", job, "model.bin", "--rank", "1")
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert ".bin is not supported: name a new file (.npz, .safetensors, .pt, .pth), or a" in said
    assert not (tmp_path / "model.bin").exists()
    result = muster("checkpoint", "export", job, "model", "--rank", "1")
    assert result.stderr == "the directory model holds 2 arrays of step 3\n"
    words = ("--format", "safetensors", "--only", "weights")
    result = muster("checkpoint", "export", job, "model.bin", "--rank", "1", *words)
    assert result.stderr == "the file model.bin holds 1 array of step 3\n"


def test_missing_checkpoints_say_where_to_look(muster: Muster, job: str) -> None:
    result = muster("checkpoint", "ls", job)
    assert result.exit_code == 5
    assert "it has saved none yet, or it saves on another machine" in result.stderr


def test_missing_checkpoints_of_a_command_say_why(
    muster: Muster, client: httpx.Client, stand_in: StandIn, name: str
) -> None:
    client.post("/jobs", json={"job_id": name, "command": ["true"]}).raise_for_status()
    result = muster("checkpoint", "ls", name)
    assert result.exit_code == 5
    assert "a command saves only with `import muster`" in result.stderr
    stand_in.end(name)
