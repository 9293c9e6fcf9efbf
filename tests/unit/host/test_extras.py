"""What an environment without the optional packages says, and the command that adds them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.main import app
from muster.host.extras import install_command

WHEEL = {"url": "file:///my%20wheels/muster_train-0.1.0-py3-none-any.whl", "archive_info": {}}
FOLDER = {"url": "file:///src/muster", "dir_info": {}}
EDITABLE = {"url": "file:///src/muster", "dir_info": {"editable": True}}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The metadata of an installation that lacks one package of the services."""
    metadata = tmp_path / "muster_train-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: muster-train\nVersion: 0.1.0\n"
        "Requires-Dist: msgspec>=0.21\n"
        "Requires-Dist: structlog>=25.5; extra == 'server'\n"
        "Requires-Dist: webserver[fast]>=1; extra == 'server'\n"
        "Requires-Dist: pgserver>=1; extra == 'dev'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path / "data"))
    return metadata


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (WHEEL, "pip install '/my wheels/muster_train-0.1.0-py3-none-any.whl[server]'"),
        (FOLDER, "pip install '/src/muster[server]'"),
        (EDITABLE, "pip install -e '/src/muster[server]'"),
        (None, "pip install 'muster-train[server]'"),
    ],
)
def test_an_extra_comes_from_where_muster_came_from(
    installed: Path, origin: dict[str, Any] | None, command: str
) -> None:
    if origin is not None:
        (installed / "direct_url.json").write_text(json.dumps(origin))
    assert install_command("server") == command


@pytest.mark.parametrize("words", [["up"], ["up", "-d"], ["run", sys.executable], ["demo"]])
def test_services_without_their_packages_are_refused(installed: Path, words: list[str]) -> None:
    (installed / "direct_url.json").write_text(json.dumps(FOLDER))
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 1
    assert ended.stderr == (
        f"muster: `muster {words[0]}` needs packages that are not installed (webserver): "
        "pip install '/src/muster[server]'\n"
    )
    assert not (installed.parent / "data").exists()


@pytest.mark.usefixtures("installed")
def test_doctor_without_the_services_only_warns() -> None:
    ended = CliRunner().invoke(app, ["doctor"])
    assert "not installed: webserver" in ended.stdout
    assert "0 problems" in ended.stderr
