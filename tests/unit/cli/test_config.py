"""Settings: their values, their origin, the configuration file, and no secret shown."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.config import (
    MASK,
    apply_config_file,
    config_file,
    origin_of,
    read_config_file,
    setting_values,
    settings,
)
from cli.errors import Misuse
from cli.main import app
from cli.services.record import service_lock, write_record
from muster.contracts.settings.paths import DataDir
from muster.contracts.token import new_text
from tests.support.services import service_record

SECRET = "hunter2secretpw"  # noqa: S105  no secret
DIGITS = "47114"  # of a password that could be taken for a port


@pytest.fixture(autouse=True)
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which nothing is set but the places."""
    own = {name: value for name, value in os.environ.items() if name not in settings()}
    own |= {"XDG_CONFIG_HOME": str(tmp_path), "MUSTER_DATA_DIR": str(tmp_path / "data")}
    monkeypatch.setattr(os, "environ", own)
    return own


def write_file(environ: dict[str, str], text: str, mode: int = 0o644) -> Path:
    file = config_file(environ)
    file.parent.mkdir()
    file.write_text(text)
    file.chmod(mode)
    return file


def show(*words: str) -> Result:
    return CliRunner().invoke(app, ["config", "show", *words])


def shown() -> dict[str, tuple[str | None, str]]:
    listed = json.loads(show("-o", "json").stdout)
    return {one["name"]: (one["value"], one["origin"]) for one in listed}


def test_documented_defaults_are_the_defaults() -> None:
    values = setting_values({})
    for name, setting in settings().items():
        literal = setting.default.strip("`")
        if f"`{literal}`" == setting.default and not literal.startswith(("~", "./")):
            assert values[name] == literal, name


def test_values_and_their_origin_are_shown(environ: dict[str, str]) -> None:
    environ |= {"MUSTER_PORT": "8100", "MUSTER_SLOTS": ""}
    found = shown()
    assert list(found) == list(settings())
    assert found["MUSTER_PORT"] == ("8100", "environment")
    assert found["MUSTER_SLOTS"][1] == "default"
    assert found["MUSTER_URL"] == ("http://127.0.0.1:8100", "default")
    assert show().stdout.splitlines()[0].split() == ["name", "value"]
    assert show("--origin").stdout.splitlines()[0].split() == ["name", "origin", "value"]


def test_address_of_running_services_is_shown(tmp_path: Path, environ: dict[str, str]) -> None:
    environ["MUSTER_PORT"] = "0"
    assert shown()["MUSTER_URL"] == (None, "default")
    certificate = tmp_path / "certificate.pem"
    certificate.touch()
    files = DataDir(tmp_path / "data")
    with service_lock(files):
        write_record(files, service_record("https://127.0.0.1:8443", ca_file=certificate))
        found = shown()
    assert found["MUSTER_URL"] == ("https://127.0.0.1:8443", "muster up")
    assert found["MUSTER_CA_FILE"] == (str(certificate), "muster up")
    environ["MUSTER_URL"] = "http://there:8000"
    assert shown()["MUSTER_URL"] == ("http://there:8000", "environment")


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@there/db",
        f"postgresql://me:a@b{SECRET}@there/db",
        f"postgresql://me:a/{SECRET}@there/db",
        f"postgresql://me:1/{SECRET}@there/db",
        f"postgresql://me:{DIGITS}?{SECRET}@there/db",
        f"postgresql://there/db?user=me&password={SECRET}&sslmode=require",
        f"postgresql://me:{SECRET}",
        f"mysql://me:{SECRET}@there/db",
        f"sqlite:////data/muster.db?key={SECRET}",
        f"me:{SECRET}",
    ],
)
def test_no_secret_is_shown(url: str, environ: dict[str, str]) -> None:
    environ |= {
        "MUSTER_DATABASE_URL": url,
        "MUSTER_TOKEN": SECRET + 32 * "x",
        "MUSTER_CLUSTER_KEY": SECRET,
    }
    said = show("--origin")
    assert said.exit_code == 0
    assert SECRET not in said.output
    assert DIGITS not in said.output
    assert shown()["MUSTER_TOKEN"] == (MASK, "environment")
    assert shown()["MUSTER_CLUSTER_KEY"] == (MASK, "environment")


def test_database_without_a_secret_is_shown_as_it_is(environ: dict[str, str]) -> None:
    for url in ("postgresql+psycopg://me@there:5432/db", "sqlite:////a@b/muster.db"):
        environ["MUSTER_DATABASE_URL"] = url
        assert shown()["MUSTER_DATABASE_URL"][0] == url


def test_token_that_a_service_issued_is_masked(environ: dict[str, str]) -> None:
    environ["MUSTER_TOKEN"] = new_text(os.urandom)
    assert environ["MUSTER_TOKEN"] not in show().output


def test_misspelt_setting_is_reported(environ: dict[str, str]) -> None:
    environ["MUSTER_PROT"] = "8100"
    assert show().stderr == "MUSTER_PROT is not a setting: did you mean MUSTER_PORT?\n"


def test_invalid_value_is_refused_with_its_origin(environ: dict[str, str]) -> None:
    file = write_file(environ, 'MUSTER_SLOTS = "many"\n')
    for words in (["config", "show"], ["status"]):
        refused = CliRunner().invoke(app, words)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert "MUSTER_SLOTS" in refused.stderr
        assert f"correct it in {file} or take it out" in refused.stderr


def test_environment_wins_over_the_file(environ: dict[str, str]) -> None:
    write_file(environ, 'MUSTER_PORT = 8100\nMUSTER_HOST = "::1"\nMUSTER_REQUIRE_TOKEN = true\n')
    environ |= {"MUSTER_PORT": "8200", "MUSTER_HOST": ""}
    apply_config_file(environ)
    in_file = read_config_file(environ)
    found = {
        name: (environ[name], origin_of(name, environ, in_file))
        for name in ("MUSTER_PORT", "MUSTER_HOST", "MUSTER_REQUIRE_TOKEN")
    }
    assert found == {
        "MUSTER_PORT": ("8200", "environment"),
        "MUSTER_HOST": ("", "default"),
        "MUSTER_REQUIRE_TOKEN": ("1", "file"),
    }


def test_missing_file_sets_nothing(environ: dict[str, str]) -> None:
    before = dict(environ)
    apply_config_file(environ)
    assert environ == before
    assert config_file({"HOME": "/home/me"}) == Path("/home/me/.config/muster/config.toml")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("MUSTER_PROT = 1", "MUSTER_PROT is not a setting: did you mean MUSTER_PORT?"),
        ('slots = "many"', "slots is not a setting: did you mean MUSTER_SLOTS?"),
        ("muster_port = 1", "muster_port is not a setting: did you mean MUSTER_PORT?"),
        ('dataset_dir = "d"', "dataset_dir is not a setting: did you mean DATASET_DIR?"),
        ("colour = 1", "colour is not a setting: see docs/reference/configuration.md"),
        ("MUSTER_PORT = [1]", "MUSTER_PORT must be a string, a number, true or false"),
        ("MUSTER_PORT =", "is not valid TOML: "),
        ('MUSTER_DATA_DIR = "d"', "MUSTER_DATA_DIR must be a whole path, such as /d or ~/d"),
        ('DATASET_DIR = "./d"', "DATASET_DIR must be a whole path"),
        ('MUSTER_CA_FILE = "ca.pem"', "MUSTER_CA_FILE must be a whole path"),
        ('MUSTER_DATABASE_URL = "sqlite:///m.db"', "MUSTER_DATABASE_URL must be a whole path"),
        ('MUSTER_TOKEN = "x"', "holds secrets and others may read it: chmod go= "),
    ],
)
def test_invalid_file_is_refused_and_sets_nothing(
    text: str, sentence: str, environ: dict[str, str]
) -> None:
    file = write_file(environ, text)
    before = dict(environ)
    with pytest.raises(Misuse) as refused:
        apply_config_file(environ)
    assert str(refused.value).startswith(str(file))
    assert sentence in str(refused.value)
    assert environ == before


def test_private_file_may_hold_a_secret(environ: dict[str, str]) -> None:
    write_file(environ, 'MUSTER_TOKEN = "x"', mode=0o600)
    apply_config_file(environ)
    assert environ["MUSTER_TOKEN"] == "x"  # noqa: S105  no secret


HERE = 'MUSTER_DATA_DIR = "~/muster"\nDATASET_DIR = "s3://bucket/d"\nMUSTER_CLUSTER = "/c.yaml"\n'


def test_whole_paths_of_the_file_are_accepted(environ: dict[str, str]) -> None:
    del environ["MUSTER_DATA_DIR"]
    write_file(environ, HERE + 'MUSTER_DATABASE_URL = "sqlite:////d.db"\n', mode=0o600)
    apply_config_file(environ)
    assert shown()["MUSTER_DATA_DIR"] == (str(Path.home() / "muster"), "file")


def test_database_in_the_data_directory_is_shown_as_a_path(environ: dict[str, str]) -> None:
    environ["MUSTER_DATA_DIR"] = "/q?1"
    assert shown()["MUSTER_DATABASE_URL"] == ("/q?1/muster.db", "default")
