"""The commands, as a user of a service types them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import cli.output
from cli.main import app
from tests.support.api_service import Service

HOUR_SECONDS = 3600.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is, a command says nothing of it beside what a test looks at."""
    monkeypatch.setattr(cli.output, "NOTICE_SECONDS", HOUR_SECONDS)


@pytest.fixture
def muster(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Result]:
    """Give the commands, as they are typed in a new directory of a user of this service."""
    for setting in ("MUSTER_HOST", "MUSTER_TOKEN"):
        monkeypatch.delenv(setting, raising=False)
    monkeypatch.setenv("MUSTER_URL", service.url)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def said(*words: str) -> Result:
        return CliRunner().invoke(app, words)

    return said
