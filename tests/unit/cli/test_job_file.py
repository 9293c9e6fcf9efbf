"""Where a field stands in a file, and what is no file of a job."""

import os
import threading
from pathlib import Path

import pytest

from cli import job_file
from cli.job_file import InvalidJobFile, JobFile, Place

TEXT = """\
# a job
name: points
env:
  LR: "1"
command:
- python
-   train.py
labels: {a: b}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("job.yaml")


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("name",), "job.yaml:2:1"),
        (("env", "LR"), "job.yaml:4:3"),
        (("command", 1), "job.yaml:7:5"),
        (("labels", "a", "deeper"), "job.yaml:8:10"),
        (("elsewhere",), "job.yaml:1:1"),
        ((), "job.yaml:1:1"),
    ],
)
def test_a_place_is_that_of_the_nearest_thing_that_has_one(
    path: Path, place: Place, said: str
) -> None:
    path.write_text(TEXT)
    assert JobFile.read(path).place(place) == said


def test_json_is_yaml(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"world_size": 4,\n "env": {"A": "b"}}')
    found = JobFile.read(path)
    assert found.fields == {"world_size": 4, "env": {"A": "b"}}
    assert found.place(("env", "A")) == f"{path}:2:10"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"name: \xff\n", "cannot be read"),
        (b"", "write fields of a job"),
        (b"just words\n", "write fields of a job"),
        (b"a: &x [*x]\n", "is no YAML"),
        (b"born: 2026-13-45\n", "is no YAML"),
        (b"a: [1,\nb: 2\n", r"nothing closes the bracket at 1:4"),
        (b"a: [\n", r"job.yaml:2:1: .*nothing closes the bracket at 1:4"),
        (b'a: "x\nb: 2\n', r"scalar that begins at 1:4"),
        (b"a: 1\n---\nb: 2\n", "job.yaml:2:1: "),
        (b"a: !python/object:os.system x\n", "job.yaml:1:4: could not determine a constructor"),
        (b"a: !!bool perhaps\n", "job.yaml is no YAML: a value is not what its tag says"),
        (b'a: !!int ""\n', "a value is not what its tag says"),
        (b"a: !!timestamp x\n", "a value is not what its tag says"),
        (b"seed: " + b"9" * 101, "job.yaml:1:7: a number has more than 100 characters"),
        (b"labels: {on: 1, yes: 2}\n", "job.yaml:1:10: on is no text here: put it in quotes"),
        (b"env:\n  1: a\n  0x1: b\n", "job.yaml:2:3: 1 is no text here"),
        (b'a: [}\nb: "\\UFFFFFFFF"\n', "job.yaml:1:5: "),
    ],
)
def test_what_describes_no_job_is_refused(path: Path, content: bytes, said: str) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidJobFile, match=said):
        JobFile.read(path)


def test_a_time_of_day_is_no_number(path: Path) -> None:
    path.write_text("env: {AT: 12:30}\n")
    assert JobFile.read(path).fields["env"] == {"AT": "12:30"}


def test_a_mapping_takes_in_another(path: Path) -> None:
    path.write_text("labels: &of_all {team: a}\nenv: {<<: *of_all, 'on': b}\n")
    assert JobFile.read(path).fields["env"] == {"team": "a", "on": "b"}


def test_a_file_that_is_not_there_is_named_once(path: Path) -> None:
    with pytest.raises(InvalidJobFile) as refused:
        JobFile.read(path)
    assert str(refused.value) == "job.yaml cannot be read: No such file or directory"


def test_a_script_is_told_what_to_say_instead() -> None:
    with pytest.raises(InvalidJobFile, match=r"muster submit -- python train\.py"):
        JobFile.read(Path("train.py"))


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "job.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("world_size: 4\n",))
    writer.start()
    assert JobFile.read(pipe).fields == {"world_size": 4}
    writer.join()


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_file, "PATIENCE_SECONDS", 0.01)
    pipe = tmp_path / "job.yaml"
    os.mkfifo(pipe)
    with pytest.raises(InvalidJobFile, match="it is a pipe that nobody writes to"):
        JobFile.read(pipe)
