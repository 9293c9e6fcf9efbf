"""Job files, and how the command line and a file make one job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cli.errors import Misuse
from cli.jobs.submit import JobDescription, read_job_file, text_of
from muster.contracts.errors import InvalidDescription
from muster.contracts.views.service import FieldError
from muster.host.code import Script
from muster.host.yaml_files import SIZE_LIMIT_BYTES, Location, YamlFile

HERE = Path("/home/me")
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


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("job.yaml")


def read(text: str, name: str = "job.yaml") -> YamlFile:
    Path(name).write_text(text)
    return read_job_file(Path(name))


@pytest.mark.parametrize(
    ("location", "position"),
    [
        (("name",), (2, 1)),
        (("env", "LR"), (4, 3)),
        (("command", 1), (7, 5)),
        (("command", 9), (5, 1)),
        (("labels", "a", "deeper"), (8, 10)),
        (("elsewhere",), (2, 1)),
        ((), (2, 1)),
    ],
)
def test_position_is_of_the_nearest_field(location: Location, position: tuple[int, int]) -> None:
    assert read(TEXT).position(location) == position


def test_json_is_yaml() -> None:
    found = read('{"world_size": 4,\n "env": {"A": "b"}}', "job.json")
    assert found.content == {"world_size": 4, "env": {"A": "b"}}
    assert found.position(("env", "A")) == (2, 10)


def test_text_that_yaml_1_1_misreads_is_text() -> None:
    found = read("env: {AT: 12:30, ON: yes, on: off}\n").content["env"]
    assert found == {"AT": "12:30", "ON": "yes", "on": "off"}


def test_mapping_can_merge_another() -> None:
    found = read("labels: &all {team: a}\nenv: {<<: *all, b: c}\n")
    assert found.content["env"] == {"team": "a", "b": "c"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: \xff\n", "job.yaml cannot be read: "),
        (b"", "job.yaml:1:1: expected fields of a job"),
        (b"just words\n", "job.yaml:1:1: expected fields of a job"),
        (b"- 1\n", "job.yaml:1:1: expected fields of a job"),
        (b"born: 2026-13-45\n", "job.yaml: invalid YAML: "),
        (b"a: [1,\nb: 2\n", r"job.yaml:3:1: .*flow sequence that begins at 1:4"),
        (b'a: "x\nb: 2\n', r"job.yaml:3:1: .*scalar that begins at 1:4"),
        (b"a: 1\nb: 2\na: 3\n", "job.yaml:3:1: found duplicate key"),
        (b"a: 1\n---\nb: 2\n", "job.yaml:2:1: "),
        (b"a: !python/object:os.system x\n", "job.yaml:1:4: could not determine a constructor"),
    ],
)
def test_invalid_file_is_refused_with_its_place(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(InvalidDescription, match=message):
        read_job_file(path)


LAUGHS = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 5))


def test_a_file_without_end_is_read_up_to_the_limit(tmp_path: Path) -> None:
    endless = tmp_path / "job.yaml"
    endless.symlink_to("/dev/zero")
    with pytest.raises(InvalidDescription, match=r"job\.yaml is larger than 1 MiB"):
        read_job_file(endless)
    (tmp_path / "train.py").symlink_to("/dev/zero")
    script = Script(str(tmp_path / "train.py"), str(tmp_path), "train.py", is_module=False)
    assert len(text_of(script)) == SIZE_LIMIT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"name: a\n#{' ' * (1 << 20)}", "is larger than 1 MiB"),
        (f"command: {[0] * 10_000}\n", "has more than 10,000 values"),
        (f"l0: &l0 [a]\n{LAUGHS}", "has more than 10,000 values"),
        ("labels: &a {b: *a}\n", "has more than 10,000 values"),
        (f"a: &a {'y' * 60_000}\nb: [{', '.join(['*a'] * 500)}]\n", "has more than 10,000 values"),
    ],
    ids=["bytes", "values", "aliases", "endless", "long"],
)
def test_a_large_file_is_refused_in_one_sentence(text: str, reason: str) -> None:
    with pytest.raises(InvalidDescription, match=f"job.yaml {reason}") as refused:
        read(text)
    assert "\n" not in str(refused.value)


def test_missing_file_is_named_once(path: Path) -> None:
    with pytest.raises(InvalidDescription) as refused:
        read_job_file(path)
    assert str(refused.value) == "job.yaml cannot be read: No such file or directory"


def test_script_is_refused_with_the_command_to_type() -> None:
    with pytest.raises(
        Misuse, match=r"write -- before it: muster submit -- bash 'a job/train\.sh'$"
    ):
        read_job_file(Path("a job/train.sh"))


def described(
    file: str | None = None, env: Mapping[str, str] | None = None, **typed: object
) -> JobDescription:
    found = None if file is None else read(file)
    return JobDescription(file=found, typed=typed, mappings={"env": env or {}})


@pytest.mark.parametrize(
    ("file", "env", "typed", "body"),
    [
        (None, {}, {}, {}),
        ("seed: 1\nepochs: 2", {}, {"seed": 3}, {"seed": 3, "epochs": 2}),
        ("max_workers: 4", {}, {"max_workers": None}, {"max_workers": None}),
        ("env: {A: a, B: b}", {"B": "c"}, {}, {"env": {"A": "a", "B": "c"}}),
        ("env:", {"B": "c"}, {}, {"env": {"B": "c"}}),
        ("env: [A=1]", {"B": "c"}, {}, {"env": ["A=1"]}),
        (None, {}, {"dataset_dir": "a/../b"}, {"dataset_dir": "/home/me/b"}),
        (
            "dataset_dir: s3://b/x",
            {},
            {"python": "b"},
            {"dataset_dir": "s3://b/x", "python": "/home/me/b"},
        ),
        ("checkpoint_dir: s3:/b", {}, {}, {"checkpoint_dir": "s3:/b"}),
        ("checkpoint_dir: /saved", {}, {}, {"checkpoint_dir": "/saved"}),
        (None, {}, {"dataset_dir": 7}, {"dataset_dir": 7}),
        (
            None,
            {},
            {"command": ["a"]},
            {"command": ["a"], "working_dir": "/home/me", "world_size": 1},
        ),
        (None, {}, {"program": "a.py:B"}, {"program": "a.py:B", "working_dir": "/home/me"}),
        ("command: [a]", {}, {}, {"command": ["a"], "working_dir": "/home/me"}),
        ("working_dir: x", {}, {"program": "a"}, {"program": "a", "working_dir": "/home/me/x"}),
    ],
)
def test_command_line_overrides_the_file(
    file: str | None, env: dict[str, str], typed: dict[str, Any], body: dict[str, Any]
) -> None:
    assert described(file, env, **typed).body(HERE) == body


@pytest.mark.parametrize(
    ("loc", "line"),
    [
        (("body", "epochs"), "job.yaml:2:1: epochs: wrong (did you mean 'x'?)"),
        (("body", "epochs", 3), "job.yaml:2:1: epochs.3: wrong (did you mean 'x'?)"),
        (("body", "seed"), "muster: seed: wrong (did you mean 'x'?)"),
        (("body", "name"), "muster: name: wrong (did you mean 'x'?)"),
        (("body",), "muster: body: wrong (did you mean 'x'?)"),
    ],
    ids=["of the file", "within a field of it", "of both", "of neither", "of the whole"],
)
def test_field_error_names_its_place(loc: tuple[str | int, ...], line: str) -> None:
    job = described("seed: 1\nepochs: 2", seed=3)
    wrong = FieldError(loc=loc, msg="wrong", type="t", hint="did you mean 'x'?")
    assert list(job.error_lines([wrong])) == [line]


def test_field_errors_come_in_the_order_of_the_file() -> None:
    job = described("seed: 1\nepochs: 2", name=3)
    wrong = [
        FieldError(loc=("body", name), msg="no", type="t") for name in ("name", "epochs", "seed")
    ]
    fields = [line.split(": ")[1] for line in job.error_lines(wrong)]
    assert fields == ["seed", "epochs", "name"]


def test_unknown_field_error_says_where_the_fields_are() -> None:
    unknown = FieldError(loc=("body", "foo"), msg="no", type="extra_forbidden")
    (line,) = described("foo: 1\n").error_lines([unknown])
    assert line.endswith(": no (muster schema lists the fields)")
