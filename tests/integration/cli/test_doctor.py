"""`muster doctor` finds what is wrong, says what to do, and changes nothing."""

import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from psycopg import connect
from sqlalchemy import URL

from cli.checks.doctor import CannotStart, require_startable
from cli.config import settings
from cli.main import app
from database.engine import Database
from database.tokens import Tokens
from muster.contracts.token import Scope
from tests.support.certificates import key_of, needs_openssl, own_certificate
from tests.support.postgres_server import PASSWORD, tcp_server
from tests.support.s3_server import new_bucket, shared_store, variables
from tests.support.scarcity import allow_no_more_files, small_disk


@pytest.fixture(autouse=True)
def data_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in settings():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    return tmp_path / "data"


@pytest.fixture
def tokens(data_dir: Path) -> Iterator[Tokens]:
    with closing(Database.open(f"sqlite:///{data_dir}/muster.db")) as database:
        yield Tokens(database)


@pytest.fixture
def secret_file(data_dir: Path) -> Path:
    secrets = data_dir / "secrets"
    secrets.mkdir(parents=True, mode=0o700)
    (secrets / "key").write_text("a long secret")
    (secrets / "key").chmod(0o600)
    return secrets / "key"


def doctor() -> tuple[int, dict[str, Any]]:
    said = CliRunner().invoke(app, ["doctor", "-o", "json"])
    return said.exit_code, {one["about"]: one for one in json.loads(said.stdout)}


def test_good_machine_has_no_problem_and_is_unchanged(data_dir: Path) -> None:
    code, found = doctor()
    assert code == 0, found
    assert {finding["verdict"] for finding in found.values()} <= {"ok", "warning"}
    assert found["database"]["seen"].endswith("its tables to be created")
    assert found["port"].keys() == {"about", "verdict", "seen", "fix"}
    assert not data_dir.exists()


def test_a_kernel_that_counts_no_waits_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.checks.doctor.counts_waits", lambda: False)
    code, found = doctor()
    assert (code, found["processor waits"]["verdict"]) == (0, "warning")
    assert "heartbeat_timeout" in found["processor waits"]["fix"]


def test_each_check_is_a_line_of_the_table() -> None:
    said = CliRunner().invoke(app, ["validate"])
    assert [line for line in said.stdout.splitlines() if line.startswith("ok       python ")]
    assert said.stderr.startswith("0 problems, ")


def test_unwritable_directory_names_its_variable(data_dir: Path) -> None:
    data_dir.write_text("a file")
    code, found = doctor()
    assert (code, found["data"]["verdict"]) == (1, "problem")
    assert "MUSTER_DATA_DIR" in found["data"]["fix"]


def test_full_disk_is_a_problem_with_its_own_fix(data_dir: Path) -> None:
    with small_disk(data_dir):
        (data_dir / "ballast").write_bytes(bytes(256 << 10))
        code, found = doctor()
        assert code == 1
        assert found["data"]["fix"] == "make room there, or set MUSTER_DATA_DIR"
        assert found["checkpoints"]["verdict"] == "ok"
        (data_dir / "ballast").unlink()
        allow_no_more_files(data_dir)
        code, found = doctor()
    assert code == 1
    assert found["data"]["fix"] == "make room there, or set MUSTER_DATA_DIR"
    assert found["room"]["verdict"] == "warning"
    assert "only 0 more files" in found["room"]["seen"]


def test_invalid_setting_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_PORT", "eight thousand")
    code, found = doctor()
    assert (code, found["settings"]["verdict"]) == (1, "problem")
    assert "MUSTER_PORT" in found["settings"]["seen"]
    assert "python" in found


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])  # the second is no machine's: RFC 5737
def test_port_that_cannot_be_used_is_a_problem(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MUSTER_HOST", host)
        monkeypatch.setenv("MUSTER_PORT", str(taken.getsockname()[1]))
        code, found = doctor()
    assert (code, found["port"]["verdict"]) == (1, "problem")
    assert host in found["port"]["seen"]


@pytest.mark.parametrize(
    ("environ", "verdict", "word"),
    [
        ({"MUSTER_HOST": "0.0.0.0"}, "problem", ""),  # noqa: S104  it is refused
        ({"MUSTER_HOST": "0.0.0.0", "MUSTER_ALLOW_PLAIN_HTTP": "1"}, "problem", "token"),  # noqa: S104
        (
            {
                "MUSTER_HOST": "0.0.0.0",  # noqa: S104
                "MUSTER_ALLOW_PLAIN_HTTP": "1",
                "MUSTER_TOKEN": "0123456789abcdef" * 4,
            },
            "ok",
            "without TLS",
        ),
        ({"MUSTER_REQUIRE_TOKEN": "1"}, "problem", "token"),
    ],
    ids=str,
)
def test_access_without_protection_or_without_token(
    environ: dict[str, str], verdict: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, found = doctor()
    assert (code, found["access"]["verdict"]) == (int(verdict == "problem"), verdict)
    assert word in found["access"]["seen"]


def test_required_token_without_an_admin_is_a_warning(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_REQUIRE_TOKEN", "1")
    tokens.create("ci", Scope.SUBMIT, lifetime=None, created_by=None)
    access = doctor()[1]["access"]
    assert access["verdict"] == "warning"
    assert "muster token create NAME --scope admin" in access["fix"]
    tokens.create("me", Scope.ADMIN, lifetime=None, created_by=None)
    assert doctor()[1]["access"]["verdict"] == "ok"


@needs_openssl
def test_certificate_that_cannot_be_loaded_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    certificate = own_certificate(tmp_path)
    monkeypatch.setenv("MUSTER_TLS_CERTFILE", str(certificate))
    monkeypatch.setenv("MUSTER_TLS_KEYFILE", str(key_of(certificate)))
    assert doctor()[1]["access"]["verdict"] == "ok"
    key_of(certificate).write_text("no key")
    code, found = doctor()
    assert (code, found["access"]["verdict"]) == (1, "problem")
    assert str(certificate) in found["access"]["seen"]


def test_secret_that_others_could_read_is_a_problem(secret_file: Path) -> None:
    (secret_file.parent / "key.0123456789abcdef.tmp").touch()  # of a command that is still at work
    assert doctor()[1]["secrets"]["seen"].startswith("1 in ")
    assert (secret_file.parent / "key.0123456789abcdef.tmp").exists()
    secret_file.chmod(0o644)
    code, found = doctor()
    assert (code, found["secrets"]["verdict"]) == (1, "problem")
    assert f"chmod go= {secret_file}" in found["secrets"]["seen"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_secret_of_another_user_is_a_problem(secret_file: Path) -> None:
    os.chown(secret_file, 12345, 12345)
    code, found = doctor()
    assert (code, found["secrets"]["verdict"]) == (1, "problem")
    assert "belongs to user 12345" in found["secrets"]["seen"]


def test_schema_of_the_database_is_shown_and_not_migrated(data_dir: Path) -> None:
    with closing(Database.open(f"sqlite:///{data_dir}/muster.db")) as database:
        revision = database.revision()
    assert doctor()[1]["database"]["seen"].endswith(f"schema {revision}")


@pytest.mark.parametrize(
    "url",
    [
        "nonsense",
        "sqlite:///{}/damaged.db",
        "mysql://there/it",
        "postgresql://me:hunter2secretpw",
        "postgresql://me@127.0.0.1:1/it?password=hunter2secretpw",
    ],
)
def test_unreadable_database_is_a_problem_without_its_password(
    url: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir.mkdir()
    (data_dir / "damaged.db").write_bytes(b"this is no database at all" * 100)
    monkeypatch.setenv("MUSTER_DATABASE_URL", url.format(data_dir))
    code, found = doctor()
    assert (code, found["database"]["verdict"]) == (1, "problem")
    assert "hunter2" not in str(found)


@pytest.mark.postgres
def test_a_server_is_judged_by_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(url: URL) -> tuple[str, str, str]:
        monkeypatch.setenv("MUSTER_DATABASE_URL", url.render_as_string(hide_password=False))
        found = doctor()[1]["database"]
        assert PASSWORD not in str(found)
        return found["verdict"], found["seen"], found["fix"]

    with tcp_server(max_connections="10") as server:
        url = server.admin
        for wrong, fix in {
            url.set(username="another"): "correct the user or the password",
            url.set(database="none"): "create it",
            url.set(port=1): "check the server",
        }.items():
            verdict, seen, _ = judged(wrong)
            assert (verdict, fix in seen) == ("problem", True), seen
        verdict, seen, fix = judged(url)
        assert verdict == "warning"
        assert seen.startswith("PostgreSQL 1")
        assert seen.endswith(", 7 connections, its tables to be created")
        assert "raise max_connections" in fix
        with ExitStack() as stack:
            plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
            for _ in range(10):
                stack.enter_context(connect(plain))
            verdict, seen, _ = judged(url)
            assert (verdict, "no connection left" in seen) == ("problem", True), seen


@pytest.mark.postgres
def test_a_database_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with tcp_server(is_standby=True) as standby:
        url = standby.admin.render_as_string(hide_password=False)
        monkeypatch.setenv("MUSTER_DATABASE_URL", url)
        code, found = doctor()
    assert (code, found["database"]["verdict"]) == (1, "problem")
    assert "hot standby" in found["database"]["seen"]
    assert "target_session_attrs" in found["database"]["fix"]
    with tcp_server() as server:
        server.run("CREATE DATABASE old ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
        url = server.admin.set(database="old").render_as_string(hide_password=False)
        monkeypatch.setenv("MUSTER_DATABASE_URL", url)
        assert "encoding LATIN1" in doctor()[1]["database"]["seen"]
        with pytest.raises(CannotStart, match="ENCODING 'UTF8'"):
            require_startable(os.environ)


@pytest.mark.parametrize(("soft", "verdict"), [(256, "problem"), (1024, "warning"), (9999, "ok")])
def test_few_descriptors_are_reported(
    soft: int, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (soft, soft))
    assert doctor()[1]["descriptors"]["verdict"] == verdict


def test_store_and_its_cache_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    access = shared_store()
    for name, value in variables(access).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MUSTER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MUSTER_CACHE_BYTES", str(3 << 30))
    monkeypatch.setenv("CHECKPOINT_DIR", str(new_bucket(access)))
    code, found = doctor()
    assert code == 0, found
    assert "can be written to" in found["store"]["seen"]
    assert "not tried: swaps that race" in found["store"]["seen"]
    assert found["cache"]["seen"].endswith("at most 3 GiB")
    monkeypatch.setenv("CHECKPOINT_DIR", "s3://missing-bucket/x")
    code, found = doctor()
    assert (code, found["store"]["verdict"]) == (1, "problem")
    assert "has no bucket 'missing-bucket'" in found["store"]["fix"]


def test_store_is_shown_though_no_default_place_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    access = shared_store()
    for name, value in variables(access).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("S3_BUCKET", "missing-bucket")
    code, found = doctor()
    assert (code, found["store"]["verdict"]) == (0, "warning")
    assert "has no bucket 'missing-bucket'" in found["store"]["fix"]
    monkeypatch.setenv("S3_BUCKET", new_bucket(access).bucket)
    assert "can be written to" in doctor()[1]["store"]["seen"]
