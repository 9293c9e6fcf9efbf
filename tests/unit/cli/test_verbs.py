"""The table of verbs against the verbs themselves."""

import inspect
import json

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.testing import CliRunner

from cli.__main__ import app
from cli.verbs import ALIASES, HEADINGS, SAID_ELSEWHERE, VERBS

LINE = 80


def test_the_version_can_be_read_by_programs() -> None:
    shown = CliRunner().invoke(app, ["version", "-o", "json"])
    assert set(json.loads(shown.stdout)) == {"version"}


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


@pytest.mark.parametrize("name", ["checkpoint", "config", "dataset", "secret", "token"])
def test_each_word_below_a_verb_has_a_sentence_that_fits_its_line(name: str) -> None:
    shown = CliRunner().invoke(app, [name, "--help"], terminal_width=LINE).output
    words = shown.partition("Commands:\n")[2].splitlines()
    assert words
    assert all(line.endswith(".") and not line.endswith("...") for line in words)


def test_help_of_a_verb_opens_with_its_own_words() -> None:
    shown = CliRunner().invoke(app, ["wait", "--help"]).output
    first = (inspect.getdoc(VERBS["wait"].load("wait").callback) or "").splitlines()[0]
    assert first in " ".join(shown.split())


def test_what_others_call_it_is_no_verb_of_ours() -> None:
    assert not set(SAID_ELSEWHERE) & (set(VERBS) | set(ALIASES))
    assert all(meant in VERBS or " " in meant for meant in SAID_ELSEWHERE.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ps", "-o", "jsno"], "'--output' / '-o': 'jsno' is none of table, json, yaml, name"),
        (["scale", "a", "two"], "'N': 'two' is no whole number"),
        (["scale", "a", "0"], "'N': 0 is less than 1"),
        (["top", "-i", "4000"], "'--interval' / '-i': 4000 is more than 3600"),
        (["wait", "a", "--timeout", "soon"], "'--timeout': 'soon' is no number"),
        (["wait", "a", "--timeout", "-1"], "'--timeout': -1 is less than 0"),
        (["completion", "dash"], "'SHELL': 'dash' is none of bash, zsh, fish"),
        (["run", "nothere.py"], "Error: there is no script nothere.py in "),
        (["run", "-n", "foo", "x.py"], "'foo' is no number of ranks: say 4, auto, cpu or gpu"),
        (["run"], "Missing argument 'SCRIPT'."),
        (["rm"], "Missing argument 'JOB'."),
        (["ps", "--outptu", "json"], "No such option: --outptu (did you mean --output?)\n"),
        (["ps", "--stat", "RUNNING"], "No such option: --stat (did you mean --status?)\n"),
        (["ps", "--al"], "No such option: --al\n"),
        (["run", "--rdvz-id", "x.py"], "No such option: --rdvz-id\n"),
    ],
)
def test_a_word_that_cannot_be_meant_is_refused_in_plain_words(words: list[str], said: str) -> None:
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert "Value error" not in refused.stderr


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["list"], "there is no verb 'list': muster ps does that: list jobs, the newest first."),
        (["kill", "a"], "there is no verb 'kill': muster stop does that: let it save"),
        (["help", "submit"], "there is no verb 'help': say muster --help, or muster VERB --help"),
        (["restart", "a"], "muster submit --set resume_from=JOB"),
        (["up", "--port", "8001"], "there is no option --port: MUSTER_PORT in the environment"),
        (["sumbit"], "Did you mean 'submit'?"),
        (["token", "craete"], "Did you mean 'create'?"),
        (["ps", "--statsu"], "--status"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest(words: list[str], hint: str) -> None:
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 2
    assert hint in said.output


@pytest.mark.parametrize(
    ("verb", "usage"),
    [
        ("run", "muster run [OPTIONS] SCRIPT [ARGUMENTS]..."),
        ("submit", "muster submit [OPTIONS] [FILE] [-- COMMAND...]"),
        ("rm", "muster rm [OPTIONS] JOB..."),
        ("secret set", "muster secret set [OPTIONS] NAME"),
    ],
)
def test_usage_is_what_is_typed(verb: str, usage: str) -> None:
    shown = CliRunner().invoke(app, [*verb.split(), "--help"]).output
    assert shown.splitlines()[0] == f"Usage: {usage}"


@pytest.mark.parametrize("verb", ["", "ps", "run", "secret", "secret set"])
def test_help_is_asked_for_in_short_as_well(verb: str) -> None:
    words = verb.split()
    short, whole = (CliRunner().invoke(app, [*words, word]) for word in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, whole.output)


def test_what_comes_after_a_script_is_its_own_also_help() -> None:
    refused = CliRunner().invoke(app, ["run", "nothere.py", "-h"])
    assert "there is no script nothere.py" in refused.stderr


def test_a_gpu_that_is_not_here_is_told_in_the_words_of_its_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cli.run.visible_gpus", lambda _: 0)
    refused = CliRunner().invoke(app, ["run", "-n", "gpu", "x.py"])
    assert refused.exit_code == 2
    assert "'--nproc-per-node': there is no GPU here: say a number, or cpu\n" in refused.stderr
