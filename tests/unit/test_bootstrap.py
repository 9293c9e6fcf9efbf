"""What the bootstrap decides, with a runner that installs nothing."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import bootstrap

VERSION = sys.version_info[:2]


class RecordedRun:
    """Leaves on disk what the real commands leave, and fails where a test wants it."""

    def __init__(self, root: Path, failing: str = "") -> None:
        self.root = root
        self.failing = failing
        self.commands: list[str] = []

    def __call__(self, command: Sequence[str], _variables: Mapping[str, str]) -> str:
        line = " ".join(command)
        self.commands.append(line)
        if self.failing and self.failing in line:
            raise subprocess.CalledProcessError(2, command)
        if "-m venv" in line:
            python = self.root / ".venv/bin/python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()
        return ""

    def made_environment(self) -> bool:
        return any("-m venv --clear .venv" in line for line in self.commands)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "requirements.lock").write_text("numpy==2.4.6\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


@pytest.fixture
def complete(checkout: Path) -> Path:
    bootstrap.refresh(checkout, RecordedRun(checkout))
    return checkout


def test_fresh_checkout_installs_the_lock_with_hashes(checkout: Path) -> None:
    run = RecordedRun(checkout)
    bootstrap.refresh(checkout, run)
    assert run.made_environment()
    assert any("--require-hashes" in line for line in run.commands)
    assert (checkout / ".venv/.stamp").read_text() == bootstrap.fingerprint(checkout, VERSION)


def test_complete_environment_runs_nothing(complete: Path) -> None:
    run = RecordedRun(complete)
    bootstrap.refresh(complete, run)
    assert run.commands == []


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_changed_lock_or_project_installs_into_it(complete: Path, name: str) -> None:
    (complete / name).write_text("changed\n")
    run = RecordedRun(complete)
    bootstrap.refresh(complete, run)
    assert any("--require-hashes" in line for line in run.commands)
    assert not run.made_environment()


@pytest.mark.parametrize("lost", [".venv/.stamp", ".venv/bin/python"])
def test_half_made_environment_is_made_again(complete: Path, lost: str) -> None:
    (complete / lost).unlink()
    run = RecordedRun(complete)
    bootstrap.refresh(complete, run)
    assert run.made_environment()


def test_another_python_makes_the_environment_again(complete: Path) -> None:
    (complete / ".venv/.stamp").write_text(bootstrap.fingerprint(complete, (3, 99)))
    run = RecordedRun(complete)
    bootstrap.refresh(complete, run)
    assert run.made_environment()


def test_failed_installation_leaves_no_stamp(complete: Path) -> None:
    (complete / "requirements.lock").write_text("changed\n")
    with pytest.raises(subprocess.CalledProcessError):
        bootstrap.refresh(complete, RecordedRun(complete, "--require-hashes"))
    assert not (complete / ".venv/.stamp").exists()


def test_where_uv_fails_pip_installs_the_same_lock(checkout: Path) -> None:
    run = RecordedRun(checkout, "-m uv pip install")
    bootstrap.refresh(checkout, run)
    assert any("-m pip install" in line and "--require-hashes" in line for line in run.commands)
    assert (checkout / ".venv/.stamp").exists()


def test_uv_gets_the_settings_of_pip_unless_it_has_its_own() -> None:
    listing = (
        ":env:.find-links='/a /b'\nglobal.index-url='https://one/simple'\n"
        "install.index-url='https://two/simple'\nglobal.cert='/ca.pem'\n"
    )
    assert bootstrap.uv_variables(listing, {"SSL_CERT_FILE": "/mine.pem"}) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/a,/b",
        "UV_DEFAULT_INDEX": "https://two/simple",
    }


def test_old_python_is_refused_in_one_line() -> None:
    refusal = bootstrap.missing_requirement((3, 10))
    assert refusal is not None
    assert "3.11 or newer and this is 3.10" in refusal
    assert "\n" not in refusal
    assert bootstrap.missing_requirement(VERSION) is None


def test_missing_ensurepip_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    refusal = bootstrap.missing_requirement(VERSION)
    assert f"python{VERSION[0]}.{VERSION[1]}-venv" in str(refusal)
