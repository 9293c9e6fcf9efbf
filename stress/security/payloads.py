"""Texts that have caused path traversal and command injection in other software.

They are in payloads.json; those of shells and languages have a place for the file to create.
"""

import json
from collections.abc import Iterator
from pathlib import Path

_TEXTS = json.loads(Path(__file__).with_suffix(".json").read_text())


def traversals(target: Path) -> Iterator[str]:
    """Yield paths that may lead to `target` from the directories of an installation."""
    yield str(target)
    for up in _TEXTS["upwards"]:
        for depth in (1, 3, 12):
            yield f"{up * depth}{target.name}"
        yield f"{up * 12}{str(target).lstrip('/')}"
    yield from _TEXTS["places"]


def injections(mark: Path) -> Iterator[str]:
    """Yield texts that create the file `mark` if they are executed or interpreted."""
    for pattern in (*_TEXTS["shells"], *_TEXTS["languages"]):
        yield pattern.format(mark)
