"""Settings as they are shown: all of them, where they are from, and no secret."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import muster.contracts.environ
from cli.__main__ import app
from cli.office import sole_office
from cli.origins import origin_of
from cli.settings import values, variable_of
from muster.contracts.environ import DoorSettings, ServiceSettings
from muster.contracts.layout import DataDirectory
from muster.contracts.token import new_text
from store.place import MASK

FIELDS = [
    field.name for kind in (ServiceSettings, DoorSettings) for field in msgspec.structs.fields(kind)
]

SECRET = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in values({}):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("field", FIELDS)
def test_every_setting_is_shown_by_the_variable_it_is_read_from(field: str) -> None:
    assert variable_of(field) in values({})
    source = Path(muster.contracts.environ.__file__).read_text()
    assert f'"{variable_of(field)}"' in source


def test_what_is_set_is_told_from_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_PORT", "8100")
    monkeypatch.setenv("MUSTER_SLOTS", "")
    said = CliRunner().invoke(app, ["config", "show", "-o", "json"])
    shown = {one["name"]: (one["value"], one["origin"]) for one in json.loads(said.stdout)}
    assert shown["MUSTER_PORT"] == ("8100", "environment")
    assert shown["MUSTER_SLOTS"][1] == "default"
    assert shown["MUSTER_URL"] == ("http://127.0.0.1:8100", "default")
    assert origin_of("MUSTER_SLOTS", {}, {}) == "default"


def test_what_commands_have_from_their_own_up_is_shown_as_what_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path))
    certificate = tmp_path / "certificate.pem"
    certificate.touch()
    with sole_office(DataDirectory(tmp_path)) as office:
        office.publish("https://127.0.0.1:8443", [], certificate)
        said = CliRunner().invoke(app, ["config", "show", "-o", "json"])
    shown = {one["name"]: (one["value"], one["origin"]) for one in json.loads(said.stdout)}
    assert shown["MUSTER_URL"] == ("https://127.0.0.1:8443", "muster up")
    assert shown["MUSTER_CA_FILE"] == (str(certificate), "muster up")
    assert shown["MUSTER_PORT"] == ("8000", "default")


def test_any_free_port_is_a_port_whose_url_only_up_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("MUSTER_PORT", "0")

    def shown() -> tuple[int, dict[str, str | None]]:
        said = CliRunner().invoke(app, ["config", "show", "-o", "json"])
        return said.exit_code, {one["name"]: one["value"] for one in json.loads(said.stdout)}

    code, found = shown()
    assert (code, found["MUSTER_PORT"], found["MUSTER_URL"]) == (0, "0", None)
    with sole_office(DataDirectory(tmp_path)) as office:
        office.publish("http://127.0.0.1:40000", [], None)
        assert shown()[1]["MUSTER_URL"] == "http://127.0.0.1:40000"
    monkeypatch.setenv("MUSTER_URL", "http://there:8000")
    assert shown()[1]["MUSTER_URL"] == "http://there:8000"


def test_the_origin_is_a_column_of_its_own() -> None:
    plain = CliRunner().invoke(app, ["config", "show"]).stdout.splitlines()
    whole = CliRunner().invoke(app, ["config", "show", "--origin"]).stdout.splitlines()
    assert plain[0].split() == ["name", "value"]
    assert whole[0].split() == ["name", "origin", "value"]
    assert max(map(len, [line for line in whole if line.endswith(" -")])) < 80


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@there/db",
        f"postgresql://me:a@b{SECRET}@there/db",
        f"postgresql://me:a/{SECRET}@there/db",
        f"postgresql://there/db?user=me&password={SECRET}&sslmode=require",
        f"postgresql://me:{SECRET}",
    ],
)
def test_no_secret_is_shown_but_that_there_is_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_DATABASE_URL", url)
    monkeypatch.setenv("MUSTER_TOKEN", SECRET)
    said = CliRunner().invoke(app, ["config", "show", "--origin"])
    assert said.exit_code == 0
    assert SECRET not in said.output
    assert [line.split() for line in said.stdout.splitlines() if "MUSTER_TOKEN" in line] == [
        ["MUSTER_TOKEN", "environment", "***"]
    ]


def test_a_misspelt_setting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_PROT", "8100")
    said = CliRunner().invoke(app, ["config", "show"])
    assert said.stderr == "MUSTER_PROT is no setting: did you mean MUSTER_PORT?\n"


def test_a_token_of_another_service_is_shown_as_one_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = new_text(os.urandom)
    monkeypatch.setenv("MUSTER_TOKEN", text)
    assert values({"MUSTER_TOKEN": text})["MUSTER_TOKEN"] == MASK
    assert values({"MUSTER_TOKEN": ""})["MUSTER_TOKEN"] is None
    said = CliRunner().invoke(app, ["config", "show"])
    assert text not in said.output


def test_a_value_that_cannot_be_meant_is_shown_with_what_is_wrong_and_where_it_is_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "muster" / "config.toml"
    file.parent.mkdir()
    file.write_text('MUSTER_SLOTS = "many"\n')
    # What a command finds in the file it adds to the environment, which is not the next test's.
    monkeypatch.setattr(os, "environ", {**os.environ, "USE_S3": "1", "MUSTER_TOKEN": "short"})
    said = CliRunner().invoke(app, ["config", "show", "--origin"])
    assert said.exit_code == 2
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in said.stdout.splitlines()}
    assert set(values({})) < set(rows)
    assert rows["MUSTER_SLOTS"].split(maxsplit=1) == ["file", "'many' is not a whole number"]
    assert rows["USE_S3"].startswith("environment  '1' is not possible in this version")
    assert "short" not in said.output
    slots = f"MUSTER_SLOTS='many' is not a whole number: correct it in {file} or take it out"
    assert f"muster: {slots}\n" in said.stderr
    assert (
        "USE_S3='1' is not possible in this version, which saves to disk: correct it in the "
        in (said.stderr)
    )
    listed = json.loads(CliRunner().invoke(app, ["config", "show", "-o", "json"]).stdout)
    assert [one["value"] for one in listed if one["problem"]] == ["many", "…", "1"]
    monkeypatch.setattr(os, "environ", {**os.environ, "USE_S3": "", "MUSTER_TOKEN": ""})
    for verb in ("status", "up"):
        refused = CliRunner().invoke(app, [verb])
        assert str(refused.exception) == slots
