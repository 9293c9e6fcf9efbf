"""What the bootstrap decides, told to a runner that installs nothing."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import bootstrap
from bootstrap import Bootstrap, CannotBootstrap

VERSION = sys.version_info[:2]


class RecordedRun:
    """Does what the real commands leave on disk, and fails where a test says so."""

    def __init__(self, root: Path, failing: str = "") -> None:
        self.root = root
        self.failing = failing
        self.commands: list[str] = []
        self.variables: dict[str, Mapping[str, str]] = {}

    def __call__(self, command: Sequence[str], variables: Mapping[str, str]) -> str:
        line = " ".join(command).replace(f"{self.root}/", "")
        self.commands.append(line)
        self.variables[line] = variables
        if self.failing and self.failing in line:
            raise subprocess.CalledProcessError(2, command)
        if "-m venv" in line:
            python = self.root / ".venv/bin/python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        return ":env:.find-links='/a /b'\n" if "config list" in line else ""

    def heard(self, words: str) -> list[str]:
        return [line for line in self.commands if words in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "requirements.lock").write_text("numpy==2.4.6\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


@pytest.fixture
def complete(checkout: Path) -> Path:
    Bootstrap(checkout, RecordedRun(checkout)).refresh()
    return checkout


def test_a_fresh_checkout_gets_an_environment_and_then_a_stamp(checkout: Path) -> None:
    run = RecordedRun(checkout)
    Bootstrap(checkout, run).refresh()
    assert run.heard("-m venv --clear .venv")
    assert run.heard("uv pip install")
    assert not run.heard("-m pip install --quiet --require-hashes")
    stamp = (checkout / ".venv/.stamp").read_text()
    assert stamp == bootstrap.fingerprint(checkout, VERSION)


def test_a_complete_environment_costs_no_process(complete: Path) -> None:
    run = RecordedRun(complete)
    Bootstrap(complete, run).refresh()
    assert run.commands == []


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_changed_lock_or_project_is_installed_into_what_is_there(
    complete: Path, name: str
) -> None:
    (complete / name).write_text("changed\n")
    run = RecordedRun(complete)
    Bootstrap(complete, run).refresh()
    assert run.heard("uv pip install")
    assert not run.heard("-m venv")


def test_another_python_makes_the_environment_anew(complete: Path) -> None:
    stamp = complete / ".venv/.stamp"
    stamp.write_text(bootstrap.fingerprint(complete, (3, 99)))
    run = RecordedRun(complete)
    Bootstrap(complete, run).refresh()
    assert run.heard("-m venv --clear")


@pytest.mark.parametrize("lost", [".venv/.stamp", ".venv/bin/python"])
def test_a_half_made_environment_is_made_anew(complete: Path, lost: str) -> None:
    (complete / lost).unlink()
    run = RecordedRun(complete)
    Bootstrap(complete, run).refresh()
    assert run.heard("-m venv --clear")


@pytest.mark.parametrize(
    "failing", ["uv==", "config list", "bin/uv", "bin/python --quiet --no-deps"]
)
def test_whatever_uv_fails_at_pip_installs_the_same_lock(checkout: Path, failing: str) -> None:
    run = RecordedRun(checkout, failing)
    Bootstrap(checkout, run).refresh()
    lock = "--require-hashes --only-binary :all: -r requirements.lock"
    assert [line for line in run.heard("-m pip install") if line.endswith(lock)]
    assert run.heard("-m pip install --quiet --no-deps --no-build-isolation -e .")
    assert (checkout / ".venv/.stamp").exists()


def test_an_installation_that_fails_leaves_no_stamp(complete: Path) -> None:
    (complete / "requirements.lock").write_text("changed\n")
    with pytest.raises(subprocess.CalledProcessError):
        Bootstrap(complete, RecordedRun(complete, "--require-hashes")).refresh()
    assert not (complete / ".venv/.stamp").exists()


def test_a_package_that_does_not_compile_is_not_the_bootstraps_concern(checkout: Path) -> None:
    Bootstrap(checkout, RecordedRun(checkout, "compileall")).refresh()
    assert (checkout / ".venv/.stamp").exists()


def test_uv_hears_what_pip_is_configured_to_do(checkout: Path) -> None:
    run = RecordedRun(checkout)
    Bootstrap(checkout, run).refresh()
    [install] = run.heard("--compile-bytecode")
    assert run.variables[install]["UV_FIND_LINKS"] == "/a,/b"


def test_the_fingerprint_follows_lock_project_python_and_folder(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("requirements.lock", "pyproject.toml"):
        (elsewhere / name).write_bytes((checkout / name).read_bytes())
    seen = {
        bootstrap.fingerprint(checkout, (3, 11)),
        bootstrap.fingerprint(checkout, (3, 12)),
        bootstrap.fingerprint(elsewhere, (3, 11)),
    }
    for name in ("requirements.lock", "pyproject.toml"):
        (checkout / name).write_text("changed\n")
        seen.add(bootstrap.fingerprint(checkout, (3, 11)))
    assert len(seen) == 5


def test_a_setting_by_variable_wins_over_the_files() -> None:
    listing = (
        ":env:.timeout='9'\n"
        "global.timeout='5'\n"
        "install.timeout='7'\n"
        "global.extra-index-url='\\nfile:///one\\nfile:///two'\n"
        "freeze.timeout='1'\n"
        "not a setting\n"
    )
    assert bootstrap.read_pip_settings(listing) == {
        "timeout": "9",
        "extra-index-url": "\nfile:///one\nfile:///two",
    }


def test_pip_settings_become_uv_variables() -> None:
    settings = {"extra-index-url": "\nfile:///one\nfile:///two", "cert": "/ca.pem", "user": "1"}
    assert bootstrap.uv_variables(settings, {}) == {
        "UV_INDEX": "file:///one file:///two",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_what_uv_was_told_directly_is_left_alone() -> None:
    told = {"UV_INDEX_STRATEGY": "first-index", "SSL_CERT_FILE": "/mine.pem"}
    assert bootstrap.uv_variables({"cert": "/ca.pem"}, told) == {}


def test_no_index_reaches_uv_as_an_argument(checkout: Path) -> None:
    def run(command: Sequence[str], variables: Mapping[str, str]) -> str:
        assert "UV_NO_INDEX" not in variables
        return "global.no-index='true'\n" if "config" in command else " ".join(command)

    assert Bootstrap(checkout, run).uv("pip", "compile").endswith("pip compile --no-index")


def test_an_old_python_is_refused_in_one_line_that_names_what_is_needed() -> None:
    with pytest.raises(CannotBootstrap) as refusal:
        bootstrap.refuse_old_python((3, 10))
    assert "3.11 or newer and this is 3.10" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    bootstrap.refuse_old_python((3, 11))


def test_missing_ensurepip_names_the_package_and_touches_nothing(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    run = RecordedRun(checkout)
    with pytest.raises(CannotBootstrap, match=rf"python{VERSION[0]}\.{VERSION[1]}-venv"):
        Bootstrap(checkout, run).refresh()
    assert run.commands == []
