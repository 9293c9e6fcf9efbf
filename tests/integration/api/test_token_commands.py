"""``muster token``, from the command line to the rows and back to the door."""

import json
import re
from collections.abc import Callable

import httpx
import pytest
from click.testing import Result

from tests.integration.api.service import Service

Muster = Callable[..., Result]


def test_a_token_is_made_shown_and_revoked(
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


def test_a_command_shows_the_token_of_its_environment(
    muster: Muster, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = muster("token", "create", "reader").stdout.strip()
    monkeypatch.setenv("MUSTER_TOKEN", text)
    refused = muster("token", "ls")
    assert refused.exit_code != 0
    assert "needs a token of scope admin" in refused.stderr


def test_what_is_no_name_is_refused_with_what_is_one(muster: Muster) -> None:
    refused = muster("token", "create", "c i")
    assert "name: use 1 to 63 letters, digits, '.', '-' or '_'" in refused.stderr


@pytest.mark.parametrize("time", ["", "90", "d", "-1d", "0s", "1.5h", "99999d", "soon"])
def test_what_is_no_time_is_refused(muster: Muster, time: str) -> None:
    before = muster("token", "ls").stdout
    refused = muster("token", "create", "late", "--expires-in", time)
    assert refused.exit_code == 2
    assert "such as 90d" in refused.output
    assert muster("token", "ls").stdout == before
