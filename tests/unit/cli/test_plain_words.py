"""What is read without Typer is read as Typer reads it, and what is refused is refused by Typer.

In which words is told by tests/unit/cli/test_verbs.py.
"""

import sys
from enum import StrEnum
from typing import Annotated, Any

import pytest
import typer

from cli.plain_words import read_plainly


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


def speak(
    word: str,
    number: Annotated[int, typer.Option(min=1, max=9)] = 3,
    share: float = 0.5,
    colour: Colour = Colour.RED,
    labels: Annotated[list[str] | None, typer.Option("--label")] = None,
    sizes: Annotated[list[int] | None, typer.Option("--size")] = None,
    *,
    loud: bool = False,
) -> None:
    typer.echo(repr((word, number, share, colour, labels, sizes, loud)))


def speaker() -> Any:  # noqa: ANN401  Typer's own click
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(speak)
    return typer.main.get_command(app)


def outcome(command: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:  # noqa: ANN401  as above
    with pytest.raises(SystemExit) as end:
        command.main(words, prog_name="speak")
    return end.value.code, capsys.readouterr()


@pytest.mark.parametrize(
    "line",
    [
        "hello",
        "5",
        "a --number 9 --colour blue --loud",
        "a --label x --label y --size 1 --size 2",
        "a --share 0.25",
        "a --number 0",
        "a --number 10",
        "a --number 007",
        "a --number +7",
        "a --number 1_0",
        "a --number ٣",
        "a --number 3.0",
        f"a --size {10**30}",
        "a --size 1 --size two",
        "a --colour green",
        "a --colour RED",
        "",
        "a b",
        "--help",
    ],
)
def test_a_word_is_read_as_typer_reads_it(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = speaker()
    read_plainly(plain)
    words = line.split()
    code, said = outcome(plain, words, capsys)
    typers_code, typers = outcome(speaker(), words, capsys)
    assert (code, said.out) == (typers_code, typers.out)
    assert said.err.partition("Error: ")[0] == typers.err.partition("Error: ")[0]


def test_plain_words_are_read_without_typer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer._adapters", None)  # cannot be imported
    plain = speaker()
    read_plainly(plain)
    words = ["a", "--number", "4", "--colour", "blue", "--label", "x", "--loud"]
    code, said = outcome(plain, words, capsys)
    assert (code, said.err) == (0, "")
    assert said.out == "('a', 4, 0.5, <Colour.BLUE: 'blue'>, ['x'], None, True)\n"


@pytest.mark.parametrize("missing", ["type_descriptor", "get_runtime_param"])
def test_a_typer_that_keeps_nothing_there_reads_its_words_itself(missing: str) -> None:
    class Silent:
        """A parameter of another Typer, in which nobody looked for plain words."""

        def __init__(self, **kept: object) -> None:
            self.__dict__.update(kept)

    kept = {"type_descriptor": object(), "get_runtime_param": lambda: None}
    strange = Silent(**{name: value for name, value in kept.items() if name != missing})
    command = speaker()
    of_typer = command.get_params
    command.get_params = lambda context: [strange] if context is None else of_typer(context)
    before = dict(vars(strange))
    read_plainly(command)
    assert command.get_params(None) == [strange]
    assert vars(strange) == before
