"""A service that cannot start prints the reason and exits with code 1."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from database.engine import Database
from tests.support.installation import DEADLINE_SECONDS, Installation, without_ours

TOO_NEW = (
    "has schema revision r9999, which this version of Muster does not know: upgrade Muster, or use "
    "another database"
)
TOO_OLD = (
    "was made by a build before 0.1.0: end its jobs with that build, move the database away, and "
    "continue from their checkpoints with resume_from"
)


def refusal(module: str, *words: str, data_dir: Path, **environment: str) -> str:
    """Return why a service does not start; it has to end with exit code 1 and a sentence."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module, *words],
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
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


@pytest.mark.parametrize("module", ["api", "coordinator", "up"])
@pytest.mark.parametrize(
    ("revision", "sentence"),
    [("r9999", TOO_NEW), ("0017", TOO_OLD)],
)
def test_a_database_of_another_version_is_left_alone(
    tmp_path: Path, module: str, revision: str, sentence: str
) -> None:
    path = tmp_path / "data" / "muster.db"
    Database.open(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE alembic_version SET version_num = ?", [revision])
        database.commit()
    before = path.read_bytes()
    words = ("cli", "up") if module == "up" else (module,)
    errors = refusal(*words, data_dir=tmp_path / "data")
    assert errors.rstrip().endswith(f"the database sqlite:///{path} {sentence}")
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "data" / "muster.db"
    path.parent.mkdir()
    path.write_text("a shopping list that was here first, long enough for a header of a database")
    before = path.read_bytes()
    errors = refusal("coordinator", data_dir=tmp_path / "data")
    assert "is not an SQLite database" in errors
    assert path.read_bytes() == before


def test_a_data_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    errors = refusal("coordinator", data_dir=tmp_path / "data")
    assert "set MUSTER_DATA_DIR" in errors


@pytest.mark.parametrize("module", ["api", "coordinator"])
@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("MUSTER_SLOTS", "none", "MUSTER_SLOTS"),
        ("MUSTER_DATABASE_URL", "postgresql://me:hunter2secretpw", "is of no known kind"),
        (
            "MUSTER_DATABASE_URL",
            "postgresql://me@127.0.0.1:1/it?password=hunter2secretpw",
            "may hold a secret",
        ),
        (
            "MUSTER_DATABASE_URL",
            "postgresql://me:hunter2secretpw@127.0.0.1:1/it",
            "cannot be used now",
        ),
    ],
)
def test_an_invalid_setting_is_named_without_its_password(
    module: str, name: str, value: str, word: str, tmp_path: Path
) -> None:
    errors = refusal(module, data_dir=tmp_path / "data", **{name: value})
    assert word in errors
    assert "hunter2" not in errors


def test_a_port_that_is_taken_is_named(installation: Installation, tmp_path: Path) -> None:
    port = installation.environment["MUSTER_PORT"]
    errors = refusal("api", data_dir=tmp_path / "data", MUSTER_PORT=port)
    assert f"cannot listen on 127.0.0.1 port {port} (Address already in use" in errors
