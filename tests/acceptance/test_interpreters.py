"""Jobs in a Python of the user's: another virtual environment than that of the services."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from muster.contracts.interpreter import VERSION, release
from tests.support.environments import ROOT, Environment, build_wheel
from tests.support.installation import DEADLINE_SECONDS, Installation, lent

PROGRAM = str(ROOT / "examples" / "together.py:Points")
OTHER_VERSION = "0.0.10"  # of another length: a .pyc of the same second and length is not stale


@pytest.fixture(scope="module")
def _services(
    tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path
) -> Iterator[Installation]:
    root = tmp_path_factory.mktemp("services")
    with Installation(root, DATASET_DIR=str(dataset_dir)) as installation:
        yield installation


@pytest.fixture
def services(_services: Installation) -> Iterator[Installation]:
    yield from lent(_services)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Without Muster, and without any other package."""
    return Environment(tmp_path_factory.mktemp("bare"), packages=False)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With Muster from its wheel, and a module that the services do not have."""
    environment = Environment(tmp_path_factory.mktemp("own"))
    environment.install(build_wheel(tmp_path_factory.mktemp("dist")))
    (environment.site / "onlyhere.py").touch()
    return environment


@pytest.fixture
def old(own: Environment) -> Iterator[Environment]:
    """The same with the Muster of another minor version."""
    with changed(own, "interpreter.py", (f'"{VERSION}"', f'"{OTHER_VERSION}"')):
        yield own


@pytest.fixture
def older(own: Environment) -> Iterator[Environment]:
    """The same with a Muster of our version from before there were protocol numbers."""
    name = ("PROTOCOL", "UNKNOWN")
    lines = ("    protocol: int = UNKNOWN\n", ""), ('tag="heartbeat"', 'tag="beat"')
    with (
        changed(own, "interpreter.py", name),
        changed(own, "messages/rank.py", name, *lines),
        changed(own, "messages/agent.py", name, lines[0]),
    ):
        yield own


@contextmanager
def changed(environment: Environment, name: str, *changes: tuple[str, str]) -> Iterator[None]:
    """Change the text of a module of its Muster."""
    module = environment.site / "muster" / "contracts" / name
    text = changed = module.read_text()
    for old, new in changes:
        assert old in changed
        changed = changed.replace(old, new)
    module.write_text(changed)
    try:
        yield
    finally:
        module.write_text(text)


class Typed:
    """Commands that are typed in a directory, with an environment active."""

    def __init__(self, services: Installation, directory: Path, python: Path) -> None:
        self.services = services
        self.directory = directory
        path = f"{python.parent}:{services.environment['PATH']}"
        self.environ = {**services.environment, "MUSTER_URL": services.url, "PATH": path}

    def muster(self, *words: str) -> tuple[int, str]:
        """Return exit code and output."""
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "muster", *words],
            cwd=self.directory,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        return ended.returncode, ended.stdout

    def submit(self, *words: str, status: str) -> str:
        """Submit a job of one rank and wait for its end; return its id."""
        code, output = self.muster("submit", "-d", "-n", "1", "-o", "json", *words)
        assert code == 0, output
        job_id = self.services.note(json.loads(output[: output.rindex("}") + 1]))
        (self.services.complete if status == "COMPLETED" else self.services.fail)(job_id)
        return job_id


WHERE = "import json, sys; print(json.dumps([sys.executable, *sys.argv[1:]]))"


@pytest.mark.parametrize(
    "words",
    [
        ("where.py", "--", "--lr", "1"),
        ("--", "python", "where.py", "--lr", "1"),
        ("--", "python3", "where.py", "--lr", "1"),
        ("--", "sh", "-c", "python where.py --lr 1"),
    ],
)
def test_command_runs_in_the_active_environment_without_muster(
    services: Installation, bare: Environment, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    job_id = Typed(services, tmp_path, bare.python).submit(*words, status="COMPLETED")
    assert services.job(job_id)["spec"]["python"] == str(bare.python)
    python, *arguments = json.loads(services.log(job_id))
    assert (Path(python).parent, arguments) == (bare.bin, ["--lr", "1"])


def test_run_uses_the_active_environment_or_the_chosen_one(
    services: Installation, bare: Environment, tmp_path: Path
) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    typed = Typed(services, tmp_path, bare.python)
    code, output = typed.muster("run", "where.py")
    assert (code, f'[0] ["{bare.python}"]' in output) == (0, True), output
    code, output = typed.muster("run", "--python", sys.executable, "-m", "where")
    assert (code, f'[0] ["{sys.executable}"]' in output) == (0, True), output
    code, output = typed.muster("run", "--python", "/nowhere/python", "where.py")
    assert (code, "File '/nowhere/python' does not exist" in output) == (2, True), output


def test_broken_python_on_path_is_passed_over(services: Installation, tmp_path: Path) -> None:
    python = tmp_path / "shims" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'pyenv: python: command not found' >&2; exit 127\n")
    python.chmod(0o755)
    (tmp_path / "where.py").write_text(WHERE)
    code, output = Typed(services, tmp_path, python).muster("run", "where.py")
    assert (code, f'[0] ["{sys.executable}"]' in output) == (0, True), output


def test_program_has_the_same_bits_in_another_environment(
    services: Installation, own: Environment, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(
        f"import onlyhere, sys\nprint('in', sys.executable)\n{PROGRAM_TEXT}"
    )
    data = ("--set", f"dataset_dir={tmp_path / 'shards'}", "--set", "epochs=4")
    typed = Typed(services, tmp_path, own.python)
    typed.muster("dataset", "synthetic", "--out", "shards", "--samples", "512", "--shards", "4")
    forked = typed.submit("--program", "program.py:Points", *data, "-n", "2", status="COMPLETED")
    started = typed.submit("--program", "program.py:Points", *data, "-e", "X=1", status="COMPLETED")
    here = typed.submit("--program", PROGRAM, *data, "--python", sys.executable, status="COMPLETED")
    for job_id in (forked, started):
        assert f"in {own.python}\n" in services.log(job_id)
        code, output = typed.muster("checkpoint", "diff", job_id, here)
        assert code == 0, output


PROGRAM_TEXT = (ROOT / "examples" / "together.py").read_text()


@pytest.mark.parametrize("words", [("--program", PROGRAM), ("--program", PROGRAM, "-e", "X=1")])
def test_program_in_an_environment_without_muster_is_refused(
    services: Installation, bare: Environment, tmp_path: Path, words: tuple[str, ...]
) -> None:
    job_id = Typed(services, tmp_path, bare.python).submit(*words, status="FAILED")
    job = services.job(job_id)
    assert (job["reason"], services.see(job_id)["restarts"]) == ("invalid_program", 0)
    expected = f"`python` is {bare.python}, which has no muster: install Muster {VERSION} there"
    assert expected in job["message"]


SCRIPT = "import muster\nrun = muster.join()\nwhile not run.should_stop: run.rest(1)\n"


@pytest.mark.parametrize(
    "words",
    [("--program", PROGRAM), ("--program", PROGRAM, "-e", "X=1"), ("--", "python", "-c", SCRIPT)],
    ids=["forked", "program", "script"],
)
@pytest.mark.parametrize(
    ("kind", "theirs"),
    [("old", release(OTHER_VERSION)), ("older", release(VERSION, 0))],
    ids=["minor", "protocol"],
)
def test_another_muster_is_refused_at_the_first_start(
    services: Installation,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    words: tuple[str, ...],
    kind: str,
    theirs: str,
) -> None:
    python = request.getfixturevalue(kind).python
    job_id = Typed(services, tmp_path, python).submit(*words, status="FAILED")
    job = services.job(job_id)
    assert (job["reason"], services.see(job_id)["restarts"]) == ("invalid_program", 0)
    assert f"`python` is {python}, whose muster is {theirs}, not {release()}: " in job["message"]


OTHER_KERNEL = """#!/bin/sh
[ -e old ] && export OPENBLAS_CORETYPE=Nehalem
exec {python} "$@"
"""


def test_a_job_does_not_go_on_with_other_arithmetic(services: Installation, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(OTHER_KERNEL.format(python=sys.executable))
    python.chmod(0o755)
    fields = {
        "mode": "synchronous",
        "world_size": 1,
        "spare_ranks": 0,
        "python": str(python),
        "working_dir": str(tmp_path),
        "env": {"X": "1"},
    }
    job_id = services.submit(**fields, epochs=1000, sleep_sec=0.05, checkpoint_every=1)
    services.wait_until(job_id, lambda seen: seen["last_checkpoint_step"])
    (tmp_path / "old").touch()
    services.kill(job_id, 0)
    services.fail(job_id)
    job = services.job(job_id)
    assert job["reason"] == "different_bits"
    assert "the BLAS kernel is Nehalem here and " in job["message"]
    assert f"go on with other bits in a new job (resume_from: {job_id})" in job["message"]
    later = services.submit(**fields, epochs=1, resume_from=job_id)
    services.wait_until(later, lambda seen: seen["last_checkpoint_step"])
    told = [event["message"] for event in services.events(later) if event["kind"] == "warned"]
    assert any("the BLAS kernel is Nehalem here and " in message for message in told)


@pytest.mark.parametrize(
    "words",
    [("--set", "max_restarts=0", "--", "python", "train.py"), ("--program", "train.py:Model")],
    ids=["command", "program"],
)
def test_failed_import_names_the_interpreter(
    services: Installation, own: Environment, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text("import torchless\n")
    job_id = Typed(services, tmp_path, own.python).submit(*words, status="FAILED")
    expected = f"`python` is {own.python}, which has no torchless: install it there, or choose "
    assert f"{expected}another with --python" in services.job(job_id)["message"]


def test_interpreter_that_is_no_file_is_refused(services: Installation) -> None:
    answer = services.request("POST", "/jobs", json={"python": "/nowhere/python"})
    assert answer.status_code == 422
    assert answer.json()["detail"] == "python: /nowhere/python is not an executable file"


def other_minors() -> Iterator[str]:
    pythons = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    pythons += map(str, Path("~/.pyenv/versions").expanduser().glob("3.1[1-9].*/bin/python"))
    for python in filter(None, pythons):
        code = "import sys; print(sys.version_info[:2])"
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if asked.returncode == 0 and asked.stdout.strip() != str(sys.version_info[:2]):
            yield python


@pytest.mark.slow
def test_program_runs_in_another_minor_version_of_python(
    services: Installation, tmp_path: Path
) -> None:
    python = next(other_minors(), None)
    if python is None:
        pytest.skip("there is no other Python of version 3.11 or newer")
    environment = Environment(tmp_path / "other", python, packages=False)
    wheel = build_wheel(tmp_path / "dist")
    # With pip's settings, as the index is part of what uv's cache goes by.
    uv = [sys.executable, "bootstrap.py", "uv", "pip", "install", "--offline", "--python"]
    words = [*uv, str(environment.python), str(wheel)]
    installed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if installed.returncode != 0:
        pytest.skip("uv has no packages for that Python in its cache")
    typed = Typed(services, tmp_path, environment.python)
    data = ("--set", f"dataset_dir={tmp_path / 'shards'}", "--set", "epochs=2")
    typed.muster("dataset", "synthetic", "--out", "shards", "--samples", "512", "--shards", "4")
    (tmp_path / "program.py").write_text(f"import sys\nprint(sys.version)\n{PROGRAM_TEXT}")
    there = typed.submit("--program", "program.py:Points", *data, status="COMPLETED")
    here = typed.submit("--program", PROGRAM, *data, "--python", sys.executable, status="COMPLETED")
    version = environment.output("import sys; print(sys.version)")
    assert version.splitlines()[0] in services.log(there)
    code, output = typed.muster("checkpoint", "diff", there, here)
    assert code == 0, output
