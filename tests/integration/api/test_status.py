"""`muster status` and `down` of services that nobody keeps with `muster up`."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import app
from tests.integration.api.service import Service, StandIn


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, service: Service, tmp_path: Path) -> None:
    monkeypatch.setenv("MUSTER_PORT", str(service.port))
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("MUSTER_URL", raising=False)


def test_what_is_missing_is_named_and_told_by_the_exit_code(stand_in: StandIn) -> None:
    well = CliRunner().invoke(app, ["status"])
    stand_in.resign()
    ill = CliRunner().invoke(app, ["status"])
    stand_in.take_office()
    assert (well.exit_code, ill.exit_code) == (0, 1)
    assert "status       ok\n" in well.output
    assert "no coordinator is running" in ill.output


def test_down_does_not_end_the_services_of_other_data(service: Service) -> None:
    down = CliRunner().invoke(app, ["down"])
    assert down.exit_code == 0
    assert "nothing runs for " in down.output
    assert service.process is not None
    assert service.process.poll() is None


def test_status_says_where_data_and_checkpoints_are(service: Service) -> None:
    said = CliRunner().invoke(app, ["status"]).output
    assert f"data         {service.files.root}\n" in said
    assert f"checkpoints  {service.root}/checkpoints\n" in said
    assert f"for these: export MUSTER_DATA_DIR={service.files.root}\n" in said
