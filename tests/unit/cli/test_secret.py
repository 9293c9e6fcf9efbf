"""A person keeps a secret: nobody sees it again, and its file is nobody else's."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from cli import secret
from cli.misuse import Misuse
from muster.contracts.secrets import SecretUnavailable
from muster.safe import Safe


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("MUSTER_URL", "http://127.0.0.1:1")  # nobody answers there
    return tmp_path / "secrets"


def muster(*words: str, standard_input: str | None = None) -> Result:
    app = typer.Typer()
    app.add_typer(secret.app, name="secret")
    return CliRunner().invoke(app, ["secret", *words], input=standard_input)


def test_a_secret_is_read_from_standard_input(directory: Path) -> None:
    result = muster("set", "hf-token", standard_input="hf_abcdefgh\n")
    assert result.exit_code == 0
    assert "hf_abcdefgh" not in result.output
    assert result.stdout == ""
    assert f"kept in {directory}; in a job: --secret VARIABLE=file:hf-token\n" in result.stderr
    assert Safe(directory).read("hf-token") == "hf_abcdefgh"
    assert (directory / "hf-token").stat().st_mode & 0o777 == 0o600


def test_names_are_shown_and_nothing_else() -> None:
    muster("set", "b", standard_input="second value")
    muster("set", "a", standard_input="first value")
    assert muster("ls").stdout == "a\nb\n"
    assert json.loads(muster("ls", "-o", "json").stdout) == ["a", "b"]


def test_a_secret_is_removed() -> None:
    muster("set", "a", standard_input="first value")
    assert muster("rm", "a").exit_code == 0
    assert muster("ls").stdout == ""
    assert isinstance(muster("rm", "a").exception, SecretUnavailable)


def test_what_is_none_is_not_kept(directory: Path) -> None:
    assert isinstance(muster("set", "../a", standard_input="value").exception, Misuse)
    assert isinstance(muster("set", "a", standard_input="").exception, Misuse)
    assert isinstance(muster("rm", "../a").exception, Misuse)
    assert not directory.exists()
