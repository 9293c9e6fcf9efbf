"""Our version, and messages about the interpreter that runs a user's code. Pure."""

import re
from typing import Final

VERSION = "0.1.0"
"""Of Muster; the build reads it here."""

_MISSING: Final = re.compile(r"No module named '?([\w.]+)")


def is_compatible(version: str) -> bool:
    """Return whether a process of Muster `version` works with ours: of the same minor version."""
    return version.split(".")[:2] == VERSION.split(".")[:2]


def version_problem(python: str, found: str | None) -> str | None:
    """Return why this interpreter, with Muster `found` or none, cannot work with our version."""
    if found is not None and is_compatible(found):
        return None
    what = "which has no muster" if found is None else f"whose muster is {found}, not {VERSION}"
    return (
        f"`python` is {python}, {what}: install Muster {VERSION} there (with pip, for Python 3.11 "
        "or newer), or choose another with --python"
    )


def import_advice(text: str, python: str | None) -> str:
    """Return what to do about a failed import that `text` reports; empty if there is none.

    `python` is the interpreter; None if only the service knows it.
    """
    missing = _MISSING.search(text)
    if missing is None:
        return ""
    which = "the `python` of the service" if python is None else f"`python` is {python}, which"
    return f"{which} has no {missing[1]}: install it there, or choose another with --python"
