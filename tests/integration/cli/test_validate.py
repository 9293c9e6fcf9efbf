"""`muster validate`: what is wrong is found, and nothing is changed by looking."""

import json
import os
import resource
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from certificates import key_of, needs_openssl, own_certificate
from scarcity import allow_no_more_files, small_disk
from typer.testing import CliRunner

from cli.__main__ import app
from cli.machine_checks import machine_checks
from cli.settings import values
from muster.contracts.token import Scope
from store.database import Database
from store.tokens import Tokens


@pytest.fixture(autouse=True)
def data_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in values({}):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    return tmp_path / "data"


def found() -> tuple[int, dict[str, Any]]:
    said = CliRunner().invoke(app, ["validate", "-o", "json"])
    return said.exit_code, {one["about"]: one for one in json.loads(said.stdout)}


def test_a_good_machine_has_no_problem_and_is_left_as_it_was(data_dir: Path) -> None:
    code, findings = found()
    assert code == 0, findings
    assert {finding["verdict"] for finding in findings.values()} <= {"ok", "warning"}
    assert findings["database"]["seen"].endswith("its tables to be made")
    assert not data_dir.exists()


def test_it_is_said_in_yaml_as_in_json() -> None:
    said = CliRunner().invoke(app, ["validate", "-o", "yaml"])
    found = yaml.safe_load(said.stdout)
    assert found[0].keys() == {"about", "verdict", "seen", "fix"}
    assert {finding["verdict"] for finding in found} <= {"ok", "warning"}


def test_each_thing_is_a_line_and_the_alias_does_the_same() -> None:
    said = CliRunner().invoke(app, ["doctor"])
    assert [line for line in said.stdout.splitlines() if line.startswith("ok       python ")]
    assert said.stderr.startswith("0 problems, ")


def test_a_place_that_cannot_be_written_is_a_problem_with_its_variable(data_dir: Path) -> None:
    data_dir.write_text("a file")
    code, findings = found()
    assert code == 1
    assert findings["data"]["verdict"] == "problem"
    assert "MUSTER_DATA_DIR" in findings["data"]["fix"]


def test_a_full_disk_is_a_problem_of_each_thing_that_has_to_be_written(data_dir: Path) -> None:
    with small_disk(data_dir):
        (data_dir / "ballast").write_bytes(bytes(256 << 10))
        code, findings = found()
    assert code == 1
    assert findings["data"]["fix"] == "make room there, or set MUSTER_DATA_DIR"
    assert findings["disk"]["fix"] == "make room there"
    assert findings["checkpoints"]["verdict"] == "ok"
    assert "machine" not in findings


def test_a_disk_that_holds_no_more_files_is_one_of_them_whatever_is_free(data_dir: Path) -> None:
    with small_disk(data_dir):
        allow_no_more_files(data_dir)
        code, findings = found()
    assert code == 1
    assert findings["data"]["fix"] == "make room there, or set MUSTER_DATA_DIR"
    assert findings["room"]["verdict"] == "warning"
    assert "only 0 more files" in findings["room"]["seen"]


def test_a_disk_that_is_read_only_is_a_problem_with_its_own_cure(data_dir: Path) -> None:
    with small_disk(data_dir):
        subprocess.run(["mount", "-o", "remount,ro", str(data_dir)], check=True)  # noqa: S607
        code, findings = found()
    assert code == 1
    assert findings["data"]["fix"] == "mount it for writing, or set MUSTER_DATA_DIR"
    assert {findings[about]["fix"] for about in ("disk", "clock")} == {"mount it for writing"}


def test_a_door_that_nobody_may_open_to_others_is_a_warning(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_REQUIRE_TOKEN", "1")
    with closing(Database.open(f"sqlite:///{data_dir}/muster.db")) as database:
        tokens = Tokens(database)
        tokens.create("ci", Scope.SUBMIT, lifetime=None, created_by=None)
        door = found()[1]["door"]
        assert door["verdict"] == "warning"
        assert "muster token create NAME --scope admin" in door["fix"]
        tokens.create("me", Scope.ADMIN, lifetime=None, created_by=None)
        door = found()[1]["door"]
        assert (door["verdict"], door["fix"]) == ("ok", "")


def test_a_setting_that_cannot_be_meant_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_PORT", "eight thousand")
    code, findings = found()
    assert code == 1
    assert "MUSTER_PORT" in findings["settings"]["seen"]
    assert "python" in findings


def test_a_port_of_somebody_else_is_a_problem_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MUSTER_PORT", str(taken.getsockname()[1]))
        code, findings = found()
    assert code == 1
    assert findings["port"]["verdict"] == "problem"


def test_a_host_that_is_not_this_machine_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_HOST", "192.0.2.1")  # of nobody, by RFC 5737
    monkeypatch.setenv("MUSTER_PORT", "8099")
    code, findings = found()
    assert code == 1
    assert "192.0.2.1" in findings["port"]["seen"]


def test_an_open_door_without_a_key_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_HOST", "0.0.0.0")  # noqa: S104  it is refused
    code, findings = found()
    assert code == 1
    assert findings["door"]["verdict"] == "problem"


def test_a_door_with_a_lock_and_nobody_who_has_a_key_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUSTER_HOST", "0.0.0.0")  # noqa: S104  it is refused
    monkeypatch.setenv("MUSTER_ALLOW_PLAIN_HTTP", "1")
    assert "there is no token yet" in found()[1]["door"]["seen"]
    monkeypatch.setenv("MUSTER_TOKEN", "0123456789abcdef" * 4)
    assert found()[1]["door"]["verdict"] == "ok"


def test_a_lock_on_the_own_door_and_nobody_who_has_a_key_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MUSTER_REQUIRE_TOKEN", "1")
    code, findings = found()
    assert (code, findings["door"]["verdict"]) == (1, "problem")
    assert "there is no token" in findings["door"]["seen"]


@needs_openssl
@pytest.mark.parametrize(("mode", "verdict"), [(0o644, "warning"), (0o640, "ok"), (0o600, "ok")])
def test_a_key_that_every_user_could_read_is_warned_of(
    mode: int, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = own_certificate(tmp_path)
    key_of(certificate).chmod(mode)
    monkeypatch.setenv("MUSTER_TLS_CERTFILE", str(certificate))
    monkeypatch.setenv("MUSTER_TLS_KEYFILE", str(key_of(certificate)))
    code, findings = found()
    assert (code, findings["door"]["verdict"]) == (0, verdict)
    assert findings["door"]["fix"] == (
        f"chmod 600 {key_of(certificate)}" if verdict == "warning" else ""
    )


def test_a_key_that_every_user_could_read_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key = tmp_path / "key.pem"
    key.write_text("-----BEGIN PRIVATE KEY-----\nno key at all\n")
    key.chmod(0o644)
    monkeypatch.setenv("MUSTER_TLS_CERTFILE", str(key))
    said = CliRunner().invoke(app, ["up"])
    assert f"others may read it: chmod 600 {key}\n" in said.stderr
    assert said.exit_code != 0


@needs_openssl
def test_a_certificate_in_the_place_of_its_key_is_a_problem_with_its_own_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = own_certificate(tmp_path)
    certificate.chmod(0o644)
    monkeypatch.setenv("MUSTER_TLS_CERTFILE", str(key_of(certificate)))
    monkeypatch.setenv("MUSTER_TLS_KEYFILE", str(certificate))
    code, findings = found()
    assert (code, findings["door"]["verdict"]) == (1, "problem")
    assert findings["door"]["fix"].startswith(f"export MUSTER_TLS_CERTFILE={certificate} ")
    said = CliRunner().invoke(app, ["up"])
    assert "chmod" not in said.stderr, "it is no key"


def test_secrets_that_others_could_read_are_a_problem(data_dir: Path) -> None:
    secrets = data_dir / "secrets"
    secrets.mkdir(parents=True, mode=0o700)
    (secrets / "key").write_text("a long secret")
    (secrets / "key").chmod(0o600)
    assert found()[1]["secrets"]["seen"].startswith("1 in ")
    (secrets / "key").chmod(0o644)
    code, findings = found()
    assert code == 1
    assert f"chmod go= {secrets}/key" in findings["secrets"]["seen"]


def test_what_another_command_has_left_unfinished_is_left_alone(data_dir: Path) -> None:
    secrets = data_dir / "secrets"
    secrets.mkdir(parents=True, mode=0o700)
    (secrets / "key.0123456789abcdef.tmp").touch()
    assert found()[1]["secrets"]["seen"].startswith("0 in ")
    assert (secrets / "key.0123456789abcdef.tmp").exists()


def test_the_schema_of_a_database_is_named_and_not_migrated(data_dir: Path) -> None:
    data_dir.mkdir()
    database = Database.open(f"sqlite:///{data_dir}/muster.db")
    revision = database.revision()
    database.close()
    assert found()[1]["database"]["seen"].endswith(f"schema {revision}")


@pytest.mark.parametrize("url", ["nonsense", "sqlite:///{}/damaged.db", "mysql://there/it"])
def test_a_database_that_cannot_be_read_is_a_problem(
    url: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir.mkdir()
    (data_dir / "damaged.db").write_bytes(b"this is no database at all" * 100)
    monkeypatch.setenv("MUSTER_DATABASE_URL", url.format(data_dir))
    code, findings = found()
    assert code == 1
    assert findings["database"]["verdict"] == "problem"


@pytest.mark.parametrize(
    "url",
    ["postgresql://me:hunter2secretpw", "postgresql://me@127.0.0.1:1/it?password=hunter2secretpw"],
)
def test_a_password_of_a_database_that_cannot_be_read_is_not_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_DATABASE_URL", url)
    _, findings = found()
    assert findings["database"]["verdict"] == "problem"
    assert "hunter2" not in str(findings)


@pytest.mark.parametrize(("soft", "verdict"), [(256, "problem"), (1024, "warning"), (9999, "ok")])
def test_few_descriptors_are_warned_of_and_very_few_are_a_problem(
    soft: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (soft, soft))
    findings = [look() for _, look in machine_checks(1)]
    assert [one.verdict for one in findings if one.about == "descriptors"] == [verdict]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_user_is_a_problem(data_dir: Path) -> None:
    secrets = data_dir / "secrets"
    secrets.mkdir(parents=True, mode=0o700)
    (secrets / "key").write_text("a long secret")
    (secrets / "key").chmod(0o600)
    os.chown(secrets / "key", 12345, 12345)
    code, findings = found()
    assert (code, findings["secrets"]["verdict"]) == (1, "problem")
    assert "belongs to user 12345" in findings["secrets"]["seen"]
