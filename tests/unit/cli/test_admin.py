"""A secret is stored and never shown; its file belongs to this user alone."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.main import app
from muster.runtime.secrets import SecretStore


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path))
    return tmp_path / "secrets"


def secret(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, ["secret", *words], input=text)


def test_secret_is_read_from_standard_input(directory: Path) -> None:
    result = secret("set", "hf-token", text="hf_abcdefgh\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "hf_abcdefgh" not in result.output
    assert f"kept in {directory}; in a job: --secret VARIABLE=file:hf-token\n" in result.stderr
    assert SecretStore(directory).read("hf-token") == "hf_abcdefgh"
    assert (directory / "hf-token").stat().st_mode & 0o777 == 0o600


def test_only_the_names_of_secrets_are_listed() -> None:
    secret("set", "b", text="second value")
    secret("set", "a", text="first value")
    assert secret("ls").stdout == "a\nb\n"
    assert json.loads(secret("ls", "-o", "json").stdout) == ["a", "b"]


def test_secret_is_removed() -> None:
    secret("set", "a", text="first value")
    assert secret("rm", "a").exit_code == 0
    assert secret("ls").stdout == ""
    assert secret("rm", "a").exit_code == 5


@pytest.mark.parametrize(("name", "text"), [("../a", "value"), ("a", ""), ("a", "x\0y")])
def test_invalid_secret_is_refused_and_not_kept(name: str, text: str, directory: Path) -> None:
    assert secret("set", name, text=text).exit_code == 2
    assert secret("ls").stdout == ""
    assert not directory.exists()


@pytest.mark.parametrize("time", ["soon", "0d", "4000d", "-1h"])
def test_invalid_lifetime_of_a_token_is_refused(time: str) -> None:
    result = CliRunner().invoke(app, ["token", "create", "ci", f"--expires-in={time}"])
    assert (result.exit_code, "--expires-in" in result.stderr) == (2, True)
