"""The table of verbs against the verbs themselves."""

import inspect

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

from cli.__main__ import app
from cli.verbs import ALIASES, HEADINGS, VERBS

LINE = 80


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_is_where_the_table_says(name: str) -> None:
    command = VERBS[name].load(name)
    assert isinstance(command, TyperCommand | TyperGroup)
    assert command.name == name
    assert command.help


def test_no_verb_has_two_headings() -> None:
    assert len(VERBS) == sum(map(len, HEADINGS.values()))


def test_an_alias_means_a_verb_and_is_none_itself() -> None:
    assert set(ALIASES.values()) <= set(VERBS)
    assert not set(ALIASES) & set(VERBS)


def test_help_fits_a_narrow_terminal_with_one_line_for_each_verb() -> None:
    lines = CliRunner().invoke(app, ["--help"], terminal_width=LINE).output.splitlines()
    assert all(len(line) < LINE for line in lines)
    for name, verb in VERBS.items():
        assert [line for line in lines if line.split()[:1] == [name] and verb.help in line]


def test_help_of_a_verb_opens_with_its_own_words() -> None:
    shown = CliRunner().invoke(app, ["wait", "--help"]).output
    first = (inspect.getdoc(VERBS["wait"].load("wait").callback) or "").splitlines()[0]
    assert first in " ".join(shown.split())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["list"], "there is no list: muster ps is it."),
        (["kill", "a"], "there is no kill: muster stop is it."),
        (["sumbit"], "Did you mean 'submit'?"),
        (["token", "craete"], "Did you mean 'create'?"),
        (["ps", "--statsu"], "--status"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest(words: list[str], hint: str) -> None:
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2
    assert hint in said.output
