"""A service that cannot start prints the reason and exits with code 1."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.agents import publish_address
from database.engine import Database
from muster.contracts.messages import CoordinatorAddress
from muster.contracts.paths import DataDir
from muster.host.processes import identify, is_stopped
from tests.support.installation import DEADLINE_SECONDS, Installation, await_value, without_ours


def start(module: str, data_dir: Path, **environment: str) -> tuple[int, str]:
    """Return exit code and errors of a service that should not go on."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module],
        cwd=data_dir.parent,
        env={
            **without_ours(os.environ),
            "MUSTER_DATA_DIR": str(data_dir),
            "MUSTER_PORT": "0",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("module", ["api", "coordinator"])
def test_a_database_of_a_newer_version_is_left_alone(tmp_path: Path, module: str) -> None:
    path = tmp_path / "data" / "muster.db"
    Database.open(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE alembic_version SET version_num = 'r9999'")
        database.commit()
    before = path.read_bytes()
    code, errors = start(module, tmp_path / "data")
    assert code == 1
    assert "has schema revision r9999" in errors
    assert "upgrade Muster, or use another database" in errors
    assert "Traceback" not in errors
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data" / "muster.db"
    path.parent.mkdir()
    path.write_text("a shopping list that was here first, long enough for a header of a database")
    before = path.read_bytes()
    code, errors = start("coordinator", tmp_path / "data")
    assert code == 1
    assert "is not an SQLite database" in errors
    assert "Traceback" not in errors
    assert path.read_bytes() == before


def test_a_data_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    code, errors = start("coordinator", tmp_path / "data")
    assert code == 1
    assert "check MUSTER_DATA_DIR" in errors
    assert "Traceback" not in errors


def test_a_suspended_coordinator_is_not_ended_for_a_url_that_is_wrong(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as suspended:  # noqa: S607
        suspended.send_signal(signal.SIGSTOP)
        await_value(lambda: is_stopped(suspended.pid), str)
        address = CoordinatorAddress(host="here", port=1, process=identify(suspended.pid))
        publish_address(address, DataDir(tmp_path / "data").coordinator_address)
        code, errors = start("coordinator", tmp_path / "data", MUSTER_DATABASE_URL="sqlight:///x")
        assert code == 1
        assert "is of no known kind" in errors
        assert suspended.poll() is None
        suspended.kill()


@pytest.mark.parametrize("module", ["api", "coordinator"])
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("postgresql://me:hunter2secretpw", "is of no known kind"),
        ("postgresql://me@127.0.0.1:1/it?password=hunter2secretpw", "may hold a secret"),
        ("postgresql://me:hunter2secretpw@127.0.0.1:1/it", "cannot be used now"),
    ],
)
def test_a_password_is_not_said_with_what_is_wrong_with_the_database(
    module: str, url: str, why: str, tmp_path: Path
) -> None:
    code, errors = start(module, tmp_path / "data", MUSTER_DATABASE_URL=url)
    assert code == 1
    assert why in errors
    assert "Traceback" not in errors
    assert "hunter2" not in errors


def test_a_setting_that_cannot_be_meant_is_named(tmp_path: Path) -> None:
    code, errors = start("coordinator", tmp_path / "data", MUSTER_SLOTS="none")
    assert code == 1
    assert "MUSTER_SLOTS" in errors
    assert "Traceback" not in errors


def test_a_port_that_is_taken_is_named(installation: Installation, tmp_path: Path) -> None:
    port = installation.environment["MUSTER_PORT"]
    code, errors = start("api", tmp_path / "data", MUSTER_PORT=port)
    assert code == 1
    assert f"cannot listen on 127.0.0.1 port {port} (Address already in use" in errors
    assert "Traceback" not in errors
