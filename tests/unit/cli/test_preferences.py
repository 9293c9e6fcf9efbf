"""Settings from a file: what holds, what goes before it, and what is refused."""

from pathlib import Path

import pytest

from cli.origins import origin_of
from cli.preferences import InvalidPreferences, file_of, preferences, settle


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path)}


def write(environ: dict[str, str], text: str, mode: int = 0o644) -> Path:
    file = file_of(environ)
    file.parent.mkdir()
    file.write_text(text)
    file.chmod(mode)
    return file


def test_without_a_file_nothing_is_set(environ: dict[str, str]) -> None:
    before = dict(environ)
    settle(environ)
    assert environ == before


def test_the_file_is_that_of_the_user(tmp_path: Path) -> None:
    assert file_of({"HOME": str(tmp_path)}) == tmp_path / ".config" / "muster" / "config.toml"


def test_what_the_file_says_holds_and_the_environment_goes_before_it(
    environ: dict[str, str],
) -> None:
    write(environ, 'MUSTER_PORT = 8100\nMUSTER_HOST = "::1"\nMUSTER_REQUIRE_TOKEN = true\n')
    environ |= {"MUSTER_PORT": "8200", "MUSTER_HOST": ""}
    settle(environ)
    said = preferences(environ)
    found = {
        name: (environ[name], origin_of(name, environ, said))
        for name in ("MUSTER_PORT", "MUSTER_HOST", "MUSTER_REQUIRE_TOKEN")
    }
    assert found == {
        "MUSTER_PORT": ("8200", "environment"),
        "MUSTER_HOST": ("", "default"),
        "MUSTER_REQUIRE_TOKEN": ("1", "file"),
    }


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("MUSTER_PROT = 1", "MUSTER_PROT is no setting: did you mean MUSTER_PORT?"),
        ("colour = 1", "colour is no setting: take it out, and muster config show "),
        ("MUSTER_PORT = [1]", "MUSTER_PORT is to be a text, a number, true or false"),
        ("MUSTER_PORT =", "is no TOML: "),
        ('MUSTER_TOKEN = "x"', "holds secrets and others may read it: chmod go= "),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_set(
    text: str, sentence: str, environ: dict[str, str]
) -> None:
    file = write(environ, text)
    before = dict(environ)
    with pytest.raises(InvalidPreferences) as refused:
        settle(environ)
    assert str(refused.value).startswith(str(file))
    assert sentence in str(refused.value)
    assert environ == before


def test_a_secret_may_stand_where_nobody_else_reads_it(environ: dict[str, str]) -> None:
    write(environ, 'MUSTER_TOKEN = "x"', mode=0o600)
    settle(environ)
    assert environ["MUSTER_TOKEN"] == "x"  # noqa: S105  no secret
