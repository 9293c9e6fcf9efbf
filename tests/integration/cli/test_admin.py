"""``muster status``, ``down`` and ``token``, against a real service."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from click.testing import Result

from tests.support.api_service import Service, StandIn

Muster = Callable[..., Result]


@pytest.fixture
def here(
    muster: Muster, monkeypatch: pytest.MonkeyPatch, service: Service, tmp_path: Path
) -> Muster:
    """Give the commands, with the port of a service that `muster up` did not start."""
    monkeypatch.setenv("MUSTER_PORT", str(service.port))
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("MUSTER_URL")
    return muster


def test_status_names_what_is_missing(here: Muster, stand_in: StandIn) -> None:
    well = here("status")
    stand_in.resign()
    ill = here("status")
    stand_in.take_office()
    assert (well.exit_code, ill.exit_code) == (0, 1)
    assert "status       ok\n" in well.output
    assert "no coordinator is running" in ill.output


def test_status_shows_where_data_and_checkpoints_are(here: Muster, service: Service) -> None:
    said = here("status").output
    assert f"data         {service.files.root}\n" in said
    assert f"checkpoints  {service.root}/checkpoints\n" in said
    assert f"for these: export MUSTER_DATA_DIR={service.files.root}\n" in said


def test_down_does_not_end_the_services_of_other_data(here: Muster, service: Service) -> None:
    down = here("down")
    assert (down.exit_code, "nothing runs for " in down.output) == (0, True)
    assert service.process is not None
    assert service.process.poll() is None


def test_token_is_created_listed_and_revoked(
    muster: Muster, service: Service, client: httpx.Client
) -> None:
    made = muster("token", "create", "ci", "--scope", "submit", "--expires-in", "90d")
    text = made.stdout.strip()
    assert re.fullmatch(r"mst_[0-9a-f]{12}_[0-9a-f]{64}", text), "and nothing else: for a script"
    assert "muster token revoke ci" in made.stderr
    header, *lines = muster("token", "ls").stdout.splitlines()
    (line,) = [line for line in lines if text[4:16] in line]
    assert header.split()[:4] == ["name", "scope", "id", "state"]
    assert line.split()[:4] == ["ci", "submit", text[4:16], "valid"]
    assert text[17:] not in line
    listed = json.loads(muster("token", "ls", "-o", "json").stdout)["tokens"]
    assert text[4:16] in [token["token_id"] for token in listed]
    mine = {"Authorization": f"Bearer {text}"}
    assert client.get("/jobs", headers=mine).status_code == 200
    assert muster("token", "revoke", "ci").stdout == "ci is revoked\n"
    assert client.get("/jobs", headers=mine).status_code == 401
    left = muster("token", "ls")
    assert text[4:16] not in left.stdout
    assert "revoked or expired: --all" in left.stderr
    (line,) = [
        one for one in muster("token", "ls", "--all").stdout.splitlines() if text[4:16] in one
    ]
    assert line.split()[3] == "revoked"
    assert text not in service.log.read_text()


def test_command_sends_the_token_of_its_environment(
    muster: Muster, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = muster("token", "create", "reader").stdout.strip()
    monkeypatch.setenv("MUSTER_TOKEN", text)
    refused = muster("token", "ls")
    assert refused.exit_code != 0
    assert "needs a token of scope admin" in refused.stderr


def test_invalid_token_name_is_refused(muster: Muster) -> None:
    refused = muster("token", "create", "c i")
    assert "name: use 1 to 63 letters, digits, '.', '-' or '_'" in refused.stderr


@pytest.mark.parametrize("time", ["", "90", "d", "-1d", "0s", "1.5h", "99999d", "soon"])
def test_invalid_lifetime_is_refused(muster: Muster, time: str) -> None:
    before = muster("token", "ls").stdout
    refused = muster("token", "create", "late", "--expires-in", time)
    assert refused.exit_code == 2
    assert "such as 90d" in refused.output
    assert muster("token", "ls").stdout == before
