"""The error tree, and printable text."""

import re
from pathlib import Path

from muster.contracts import errors
from muster.contracts.errors import printable

LIBRARY = Path(errors.__file__).parents[1]


def test_error_tree_in_docstring_is_complete() -> None:
    branches = {
        branch
        for folder in ("contracts", "checkpoints", "collectives", "datasets", "mesh", "objects")
        for module in (LIBRARY / folder).rglob("*.py")
        for branch in re.findall(r"^class (\w+)\(MusterError\)", module.read_text(), re.MULTILINE)
    }
    assert set(re.findall(r"[├└]── (\w+)", errors.__doc__ or "")) == branches


def test_printable_text_is_unchanged() -> None:
    assert printable("größe 🎉\nof two lines") == "größe 🎉\nof two lines"


def test_control_characters_are_escaped() -> None:
    assert printable("\x1b[2J\x9b1m\r\u202e\udcff") == r"\x1b[2J\x9b1m\r\u202e\udcff"
