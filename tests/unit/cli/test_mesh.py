"""The secret of a household: made on one machine, kept on the others, refused in one sentence."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.checks.doctor import Verdict
from cli.main import app
from cli.mesh import findings_of_node
from muster.mesh.node import Status
from muster.mesh.secret import make_secret


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "data"))
    for name in ("MUSTER_CLUSTER_KEY", "MUSTER_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "data"


def mesh(*words: str, text: str | None = None) -> Result:
    return CliRunner().invoke(app, ["mesh", *words], input=text)


def test_a_secret_is_made_here_and_kept_elsewhere(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = mesh("secret")
    assert made.exit_code == 0
    assert (directory / "cluster.key").read_text() == made.stdout
    assert (directory / "cluster.key").stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert f"kept in {directory}/cluster.key" in made.stderr
    assert "muster mesh join" in made.stderr
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "other"))
    joined = mesh("join", text=f" {made.stdout.upper()}\n")
    assert (joined.exit_code, joined.stdout) == (0, "")
    assert made.stdout.strip() not in joined.stderr.lower()
    assert (tmp_path / "other" / "cluster.key").exists()


def test_a_secret_is_made_only_once(directory: Path) -> None:
    mesh("secret")
    kept = (directory / "cluster.key").read_bytes()
    again = mesh("secret")
    assert (again.exit_code, again.stdout) == (2, "")
    assert "cluster.key holds another secret" in again.stderr
    assert (directory / "cluster.key").read_bytes() == kept


@pytest.mark.parametrize("text", ["", "correct horse battery staple", "\x80\n"])
def test_what_is_no_secret_is_refused_and_not_kept(directory: Path, text: str) -> None:
    result = mesh("join", text=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a character is wrong" in result.stderr
    assert not (directory / "cluster.key").exists()


def test_the_variable_is_named_that_overrides_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_CLUSTER_KEY", make_secret())
    assert "MUSTER_CLUSTER_KEY is set, and used instead" in mesh("secret").stderr


def test_a_data_directory_that_scripts_do_not_see_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "muster").mkdir()
    (tmp_path / "muster" / "config.toml").write_text(f'MUSTER_DATA_DIR = "{tmp_path}/data"')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    # Set and taken away again, so that what the command takes from the file ends with this test.
    monkeypatch.setenv("MUSTER_DATA_DIR", "")
    monkeypatch.delenv("MUSTER_DATA_DIR")
    assert f"export MUSTER_DATA_DIR={tmp_path}/data\n" in mesh("secret").stderr


@pytest.mark.parametrize("words", [[], ["doctor"]])
def test_a_machine_without_a_secret_gets_the_commands(words: list[str]) -> None:
    result = mesh(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "muster mesh secret" in result.stderr
    assert "muster mesh join" in result.stderr


def test_a_secret_that_others_could_read_is_refused(directory: Path) -> None:
    mesh("secret")
    (directory / "cluster.key").chmod(0o644)
    result = mesh()
    assert (result.exit_code, result.stdout) == (2, "")
    assert "can be read by others" in result.stderr


@pytest.mark.parametrize("name", ["zeroconf", "ifaddr"])
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in ("muster.mesh.group", "muster.mesh.announce"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    result = mesh()
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"muster.mesh needs {name}, which is not installed: pip install" in result.stderr
    assert "[home]" in result.stderr


def test_the_doctor_repeats_what_a_node_has_found() -> None:
    status = Status(
        node_id="n-1",
        host="desk",
        state="idle",
        master=None,
        epoch=0,
        may_lead=False,
        ring=(),
        peers=(),
        links=(),
        events=(),
        counters={},
        warnings=("/x cannot be written (No space left on device): make room there",),
    )
    (finding,) = findings_of_node(status)
    assert (finding.about, finding.fix) == ("desk node", "make room there")
    assert finding.verdict is Verdict.PROBLEM
