"""What others have named so that a terminal would obey it."""

import json

import pytest
import yaml

from cli.output import Output, show

NAME = "\x1b]0;done\x07\x1b[2J\x7f\x9bm"


@pytest.mark.parametrize("output", Output)
def test_no_control_character_reaches_a_terminal(
    output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    show(output, {"name": NAME}, [f"name  {NAME}", "größe"], [NAME])
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_a_program_gets_all_that_was_said(
    output: str, read: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(read)
    show(Output(output), {"name": f"{NAME} größe"}, [], [])
    assert read(capsys.readouterr().out) == {"name": f"{NAME} größe"}
