from pathlib import Path

import msgspec
import pytest

from muster.contracts.errors import InvalidSpec
from muster.contracts.job.field_types import (
    COMMAND_LIMIT,
    COMMAND_LIMIT_BYTES,
    COMPRESSION_WANTED,
    ENVIRONMENT_LIMIT_BYTES,
    MAPPING_LIMIT,
    TEXT_LIMIT,
    KeepBest,
    RandomCompression,
    ResumeFrom,
)
from muster.contracts.job.limits import LIMITS
from muster.contracts.job.problems import checked, checked_job_id, field_errors, problems
from muster.contracts.job.spec import JobRequest, JobSpec
from muster.contracts.messages.agent import StartRank
from muster.contracts.messages.wire import encode
from muster.contracts.settings.environ import Assignment, rank_environment
from muster.links.frames import frame

NAN = float("nan")
INFINITY = float("inf")
LINUX_STRING_BYTES = 1 << 17
"""Longest argument or environment entry that Linux gives to a new program."""

WHOLE_NUMBERS = [name for name in LIMITS if type(getattr(JobSpec(), name)) is int]


def fields_of(spec: JobSpec) -> set[str]:
    return {problem.field for problem in problems(spec)}


GOOD = [
    {},
    {"world_size": 1, "min_workers": 1, "max_workers": 1},
    {"world_size": 2, "min_workers": 2, "max_workers": 9},
    {"name": "größe 🎉"},
    {"name": "x" * TEXT_LIMIT},
    {"command": ("true",)},
    {"command": ("python", "")},
    {"command": ("true",) * COMMAND_LIMIT},
    {"env": {"A_b9": "", "_": "=\n"}},
    {"labels": {"": "", "any thing": "goes"}},
    {"labels": {str(number): "" for number in range(MAPPING_LIMIT)}},
    {"mode": "synchronous"},
    {"mode": "synchronous", "program": "train.py:Net"},
    {"mode": "synchronous", "program": "/a dir/ü:x.py:Größe"},
    {"mode": "synchronous", "program": "package.module:Net"},
    {"mode": "synchronous", "replay_every": 1, "backend": "tcp"},
    {"mode": "synchronous", "bits": "any"},
    {"mode": "synchronous", "batch_size": 2, "virtual_shards": 1},
    {"mode": "synchronous", "virtual_shards": 4096},
    {"mode": "synchronous", "compression": "int8"},
    {"mode": "synchronous", "compression": "random:1", "compression_groups": 1},
    {"mode": "synchronous", "compression": RandomCompression("random", 1e-3)},
    {"mode": "synchronous", "command": ("true",), "compression_groups": 4},
    {"batch_size": 17, "virtual_shards": 16},
    {"command": ("true",), "batch_size": 1},
    {"command": ("true",), "restart_scope": "gang"},
    {"checkpoint_every": "auto"},
    {"mode": "synchronous", "command": ("true",), "checkpoint_every": "auto"},
    {"vram_mb": 1, "ram_mb": 1 << 30, "hosts": ("gpu-box", "a.local")},
    {"resume_from": "a"},
    {"resume_from": "0-_" + "x" * 60},
    {"resume_from": "a:0"},
    {"resume_from": "a:best"},
    {"resume_from": ResumeFrom("a", 7)},
    {"mode": "synchronous", "command": ("true",), "keep_best": KeepBest("val_loss", "max")},
]


@pytest.mark.parametrize("good", GOOD)
def test_a_valid_job_is_accepted(good: dict[str, object]) -> None:
    assert list(problems(JobSpec(**good))) == []


@pytest.mark.parametrize(
    ("fields", "every"),
    [
        ({}, 5),
        ({"command": ("true",)}, 5),
        ({"command": ("true",), "mode": "synchronous"}, "auto"),
        ({"command": ("true",), "mode": "synchronous", "checkpoint_every": 7}, 7),
        ({"program": "a:B", "checkpoint_every": "auto"}, "auto"),
    ],
)
def test_a_script_with_its_own_loop_saves_by_cost(fields: dict[str, object], every: object) -> None:
    assert JobRequest(**fields).spec().checkpoint_every == every


WRONG = [
    ("restart_scope", "gang"),
    ("world_size", 10**400),
    ("min_workers", 5),
    ("max_workers", 3),
    ("virtual_shards", -8),
    ("virtual_shards", 48),
    ("program", "train.py:Net"),
    ("program", ""),
    ("replay_every", 2),
    ("compression", "int8"),
    ("compression_groups", 8),
    ("bits", "any"),
    ("bits", "other"),
    ("checkpoint_every", "often"),
    ("checkpoint_every", None),
    ("sleep_sec", NAN),
    ("sleep_sec", INFINITY),
    ("heartbeat_timeout", NAN),
    ("heartbeat_timeout", INFINITY),
    ("stop_grace_seconds", -INFINITY),
    ("progress_timeout_seconds", NAN),
    ("name", ""),
    ("name", "a\0b"),
    ("name", "half a \ud800 pair"),
    ("name", "x" * (TEXT_LIMIT + 1)),
    ("name", "\x1b]0;done\x07"),
    ("name", "\x9b2J"),
    ("name", "two\nlines"),
    ("dataset_dir", ""),
    ("dataset_dir", "/data\0"),
    ("dataset_dir", "/data\x1b[2J"),
    ("checkpoint_dir", ""),
    ("working_dir", ""),
    ("working_dir", "\udfff"),
    ("command", ()),
    ("command", ("",)),
    ("command", ("", "true")),
    ("command", ("true", "\0")),
    ("command", ("true", "\ud800")),
    ("command", ("true",) * (COMMAND_LIMIT + 1)),
    ("command", ("true", "x" * (TEXT_LIMIT + 1))),
    ("command", ("true", *["x" * TEXT_LIMIT] * 30)),
    ("command", ("true", *["ü" * TEXT_LIMIT] * 15)),
    ("command", ("true", *["\x01" * TEXT_LIMIT] * 5)),
    ("env", {"": "a"}),
    ("env", {"A-B": "a"}),
    ("env", {"A=B": "a"}),
    ("env", {"1A": "a"}),
    ("env", {"A\n": "a"}),
    ("env", {"Ä": "a"}),
    ("env", {"A" * 129: "a"}),
    ("env", {"A": "a\0"}),
    ("env", {"A": "\ud800"}),
    ("env", {"A": "x" * (TEXT_LIMIT + 1)}),
    ("env", {f"A{number}": "" for number in range(MAPPING_LIMIT + 1)}),
    ("env", {f"A{number}": "x" * TEXT_LIMIT for number in range(MAPPING_LIMIT)}),
    ("env", {f"A{number}": "🎉" * TEXT_LIMIT for number in range(40)}),
    ("labels", {"a": "\0"}),
    ("labels", {"a\0": ""}),
    ("labels", {"a\x7f": ""}),
    ("labels", {"a": "\x1bc"}),
    ("labels", {"a": "x" * (TEXT_LIMIT + 1)}),
    ("labels", {str(number): "" for number in range(MAPPING_LIMIT + 1)}),
    ("hosts", ()),
    ("hosts", ("",)),
    ("hosts", ("-x",)),
    ("hosts", ("a\n",)),
    ("checkpoint_dir", "~/checkpoints"),
    ("dataset_dir", "~"),
    ("working_dir", "~me/project"),
    ("python", "~/venv/bin/python"),
    ("keep_best", KeepBest("val_loss")),
    ("resume_from", ""),
    ("resume_from", "../other"),
    ("resume_from", "a/b"),
    ("resume_from", "a\n"),
    ("resume_from", "-a"),
    ("resume_from", "a" * 64),
    ("resume_from", "a:"),
    ("resume_from", "a:-1"),
    ("resume_from", "a:7:best"),
    ("resume_from", ResumeFrom("a/b")),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_an_invalid_value_is_refused_by_its_field(field: str, value: object) -> None:
    assert fields_of(JobSpec(**{field: value})) == {field}


PARTS = [
    ({"keep_best": "val_loss"}, "keep_best: expected a mapping, got 'val_loss'"),
    ({"keep_best": {}}, "keep_best.metric: is required"),
    ({"keep_best": {"metric": ""}}, "keep_best.metric: name a metric"),
    ({"keep_best": {"metric": "a", "mode": "least"}}, "keep_best.mode: expected max or min"),
    ({"keep_best": {"metric": "a", "step": 1}}, "keep_best.step: there is no such field"),
    ({"compression": "random:0.1"}, None),
    ({"compression": "topk"}, f"compression: {COMPRESSION_WANTED}"),
    ({"compression": {"kind": "powersgd", "ratio": 0.1}}, "compression.kind: expected random"),
    ({"compression": {"kind": "random"}}, "compression.ratio: is required"),
    ({"compression": {"kind": "random", "ratio": 0}}, "compression.ratio: 0 is not"),
    ({"compression": {"kind": "random", "ratio": 1.5}}, "compression.ratio: 1.5 is not"),
    ({"compression_groups": 65}, "compression_groups: 65 is not between 1 and 64"),
    ({"resume_from": {}}, "resume_from.job: is required"),
    ({"resume_from": {"job": "a/b"}}, "resume_from.job: use 1 to 63 letters"),
    ({"resume_from": {"job": "a", "step": -1}}, "resume_from.step: -1 is not between 0 and"),
    ({"resume_from": {"job": "a", "step": "last"}}, "resume_from.step: expected an integer"),
    ({"resume_from": {"job": "a", "best": 1}}, "resume_from.best: there is no such field"),
    ({"resume_from": "a b"}, "resume_from: name a job by its id"),
    ({"resume_from": {"job": "a", "step": "best"}, "keep_best": {"metric": "a"}}, None),
]


@pytest.mark.parametrize(("document", "wanted"), PARTS)
def test_the_parts_of_a_field_are_checked_by_name(
    document: dict[str, object], wanted: str | None
) -> None:
    found = [f"{'.'.join(it.loc[1:])}: {it.msg}" for it in field_errors(document, JobRequest)]
    assert len(found) == bool(wanted)
    assert not wanted or found[0].startswith(wanted)


def test_a_gang_resumes_from_what_all_ranks_have() -> None:
    gang = JobSpec(command=("true",), restart_scope="gang", resume_from="a:7")
    assert fields_of(gang) == {"resume_from"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("command", ("sh", "x" * (TEXT_LIMIT + 1)), "word 2 is longer than 4096 characters"),
        ("env", {"A": "x" * (TEXT_LIMIT + 1)}, "the value of 'A' is longer than 4096 characters"),
        (
            "labels",
            {"a": "x" * (TEXT_LIMIT + 1)},
            "the value of 'a' is longer than 4096 characters",
        ),
        ("env", {"A" * 129: ""}, "this value: use up to 128 letters, digits and _"),
    ],
)
def test_a_limit_is_named_with_its_place_and_number(
    field: str, value: object, message: str
) -> None:
    assert [it.message for it in problems(JobSpec(**{field: value}))] == [message]


WRONG_TOGETHER = [
    ("program", {"command": ("true",), "program": "train.py:Net"}),
    ("world_size", {"world_size": 251}),
    ("max_workers", {"world_size": 2, "max_workers": 251}),
    ("program", {"program": ""}),
    ("program", {"program": "train.py"}),
    ("program", {"program": "~/train.py:Net"}),
    ("program", {"program": "train.py:"}),
    ("program", {"program": ":Net"}),
    ("program", {"program": "train.py:Net()"}),
    ("program", {"program": "a/b:Net"}),
    ("program", {"program": "a..b:Net"}),
    ("program", {"program": "half a \ud800.py:Net"}),
    ("program", {"program": "x" * TEXT_LIMIT + ".py:Net"}),
    ("batch_size", {"batch_size": 32}),
    ("batch_size", {"batch_size": 65}),
    ("batch_size", {"batch_size": 96, "virtual_shards": 64}),
    ("virtual_shards", {"batch_size": 96, "virtual_shards": 0}),
    ("compression_groups", {"compression_groups": 8}),
    ("compression_groups", {"compression": "int8", "compression_groups": 3}),
    ("compression_groups", {"compression": "bf16", "compression_groups": 64}),
    ("compression", {"compression": "random:0"}),
    ("compression", {"compression": "random:1.5"}),
    ("compression", {"compression": "random:1e-"}),
    ("compression", {"compression": RandomCompression("random", NAN)}),
]


@pytest.mark.parametrize(("field", "fields"), WRONG_TOGETHER)
def test_an_invalid_synchronous_job_is_refused_by_its_field(
    field: str, fields: dict[str, object]
) -> None:
    assert fields_of(JobSpec(mode="synchronous", **fields)) == {field}


@pytest.mark.parametrize(
    ("size", "shards", "nearest"),
    [
        (1, 32, 64),
        (65, 32, 64),
        (79, 32, 64),
        (80, 32, 96),
        (100, 16, 96),
        (1, 1, 2),
        (999_999, 32, 1_000_000),
        (999_999, 4096, 999_424),
    ],
)
def test_a_batch_that_does_not_fit_names_the_nearest_that_does(
    size: int, shards: int, nearest: int
) -> None:
    spec = JobSpec(mode="synchronous", batch_size=size, virtual_shards=shards)
    (problem,) = problems(spec)
    assert f"({shards}) and at least 2 times as much: {nearest} is the nearest" in problem.message
    assert list(problems(msgspec.structs.replace(spec, batch_size=nearest))) == []


def test_only_a_synchronous_job_grows_to_max_workers() -> None:
    assert JobSpec(mode="synchronous", world_size=2).largest_world_size == 2
    assert JobSpec(mode="synchronous", world_size=2, max_workers=5).largest_world_size == 5
    assert JobSpec(mode="independent", world_size=2, max_workers=5).largest_world_size == 2


@pytest.mark.parametrize("field", LIMITS)
def test_every_limit_holds_on_both_sides(field: str) -> None:
    low, high = LIMITS[field].low, LIMITS[field].high
    step = 1 if field in WHOLE_NUMBERS else 0.5
    for value, good in [(low, True), (high, True), (low - step, False), (high + step, False)]:
        # With the pool's other sizes out of the way.
        ample = {"world_size": 4096} if field == "min_workers" else {"world_size": 1}
        ample |= {"command": ("true",)} if field == "gpus_per_rank" else {}
        if field == "compression_groups":
            ample |= {"compression": "int8", "virtual_shards": 64}
        is_synchronous = field in {"replay_every", "compression_groups"}
        mode = "synchronous" if is_synchronous else "independent"
        spec = JobSpec(**{**ample, "mode": mode, field: value})
        assert (field not in fields_of(spec)) == good, value


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ("slurm", {"partition": "-x"}, "partition: use a name as the commands of Slurm take it"),
        ("slurm", {"partition": "a b"}, "partition: use a name as the commands of Slurm take it"),
        ("slurm", {"qos": "$(reboot)"}, "qos: use a name as the commands of Slurm take it"),
        ("slurm", {"gres": "gpu:1\n#SBATCH"}, "gres: use a name as the commands of Slurm take it"),
        ("slurm", {"time": "soon"}, "time: use minutes, hours:minutes:seconds or days-hours"),
        ("slurm", {"ranks_per_host": 0}, "ranks_per_host: 0 is not between 1 and 4096"),
        ("slurm", {"ranks_per_host": "2"}, "ranks_per_host: expected an integer, got '2'"),
        (
            "slurm",
            {"partitions": "a"},
            "partitions: there is no such field (did you mean 'partition'?)",
        ),
        ("kubernetes", {}, "image: is required"),
        ("kubernetes", {"image": "a b"}, "image: use an image as kubectl run takes it"),
        (
            "kubernetes",
            {"image": "i", "image_pull_secrets": ["A"]},
            "image_pull_secrets.0: use a Kubernetes name",
        ),
        ("ssh", {"partition": "a"}, "needs engine slurm or kubernetes"),
        (None, {"partition": "a"}, "needs engine slurm or kubernetes"),
    ],
)
def test_options_of_an_engine_follow_its_schema(
    engine: str | None, options: dict[str, object], words: str
) -> None:
    (problem,) = problems(JobSpec(engine=engine, engine_options=options))
    assert (problem.field, problem.message) == ("engine_options", words)


def test_bits_that_may_differ_are_not_compared() -> None:
    assert fields_of(JobSpec(mode="synchronous", bits="any", replay_every=2)) == {"replay_every"}


def test_all_problems_are_reported_at_once() -> None:
    spec = JobSpec(world_size=0, name="", env={"A-B": "\0"}, resume_from=".")
    with pytest.raises(InvalidSpec) as caught:
        checked(spec)
    assert {problem.field for problem in caught.value.problems} == {
        "world_size",
        "min_workers",
        "name",
        "env",
        "resume_from",
    }
    for problem in caught.value.problems:
        assert f"{problem.field}: {problem.message}" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (JobSpec(world_size=0, min_workers=0), "0 is not between 1 and 4096"),
        (JobSpec(min_workers=5), "5 is more than the world size 4"),
        (JobSpec(max_workers=3), "3 is less than the world size 4"),
        (JobSpec(name=""), "is empty: leave it out instead"),
        (JobSpec(program="a:B"), "needs mode synchronous; put a script into command"),
        (JobSpec(mode="synchronous", program="a"), "use file.py:Name or package.module:Name"),
        (JobSpec(virtual_shards=48), "48 is not a power of two"),
        (
            JobSpec(mode="synchronous", world_size=251),
            "more than 250 ranks cannot train one model together",
        ),
        (
            JobSpec(mode="synchronous", command=("true",), program="a:B"),
            "a command has its own loop: leave one of the two out",
        ),
        (
            JobSpec(command=("true",), restart_scope="gang", checkpoint_every="auto"),
            "auto is not for a gang, whose ranks must save the same steps: give a number of steps",
        ),
        (JobSpec(checkpoint_every="often"), "expected a number of steps, or auto, got 'often'"),
        (JobSpec(gpus_per_rank=1), "needs a command: other programs use no GPU"),
        (JobSpec(command=()), "names no program: give at least one word, or leave it out"),
    ],
)
def test_a_problem_is_a_sentence(spec: JobSpec, problem: str) -> None:
    assert problem in {found.message for found in problems(spec)}


def test_the_largest_valid_job_fits_into_a_frame() -> None:
    words = ("true", *["x" * TEXT_LIMIT] * (COMMAND_LIMIT_BYTES // TEXT_LIMIT - 1))
    values = {f"A{number}": "x" * 4000 for number in range(ENVIRONMENT_LIMIT_BYTES // 4010)}
    spec = checked(JobSpec(command=words, env=values))
    assert len(msgspec.msgpack.encode(spec)) > 0.9 * (COMMAND_LIMIT_BYTES + ENVIRONMENT_LIMIT_BYTES)
    assignment = Assignment(
        job_id="job",
        job_uid="uid",
        rank=0,
        attempt=0,
        checkpoint_dir=Path("/" + "c" * TEXT_LIMIT),
        dataset_dir=Path("/" + "d" * TEXT_LIMIT),
        master_port=1,
        generation=0,
    )
    environment = rank_environment(spec, assignment)
    assert max(len(f"{name}={value}") for name, value in environment.items()) < LINUX_STRING_BYTES
    order = StartRank(rank=0, attempt=0, environment=environment, working_dir="/")
    assert frame(encode(order))


@pytest.mark.parametrize("text", ["a", "A9", "0", "a-b_c", "x" * 63])
def test_a_valid_job_id_is_kept(text: str) -> None:
    assert checked_job_id(text) == text


@pytest.mark.parametrize(
    "text", ["", ".", "..", "a.b", "a/b", "-a", "_a", "a b", "a\n", "ä", "٣", "x" * 64, "a\0"]
)
def test_a_job_id_is_not_a_path(text: str) -> None:
    with pytest.raises(InvalidSpec, match="use 1 to 63 letters") as caught:
        checked_job_id(text)
    assert [problem.field for problem in caught.value.problems] == ["job_id"]
