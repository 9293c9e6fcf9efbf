"""Our version, and messages about the interpreter that runs a user's code. Pure."""

import re
from typing import Final

VERSION = "0.1.0"
"""Of Muster; the build reads it here."""

PROTOCOL: Final = 1
"""Of all links between processes. Raise it, once per release, when a message changes."""

_MISSING: Final = re.compile(r"No module named '?([\w.]+)")


def is_compatible(version: str, protocol: int) -> bool:
    """Return whether that Muster works with ours: of the same minor version and protocol."""
    return protocol == PROTOCOL and version.split(".")[:2] == VERSION.split(".")[:2]


def release(version: str = VERSION, protocol: int = PROTOCOL) -> str:
    """Return the name of a Muster; `version` is empty for one that does not tell it."""
    return f"{version or 'an older one'} (protocol {protocol})"


def version_problem(python: str, found: str | None, protocol: int = 0) -> str | None:
    """Return why this interpreter, with Muster `found` or none, cannot work with our version."""
    if found is not None and is_compatible(found, protocol):
        return None
    what = "which has no muster"
    if found is not None:
        what = f"whose muster is {release(found, protocol)}, not {release()}"
    return (
        f"`python` is {python}, {what}: install Muster {VERSION} there (with pip, for Python 3.11 "
        "or newer), or choose another with --python"
    )


def import_advice(text: str, python: str | None, script: str = "") -> str:
    """Return what to do about a failed import that `text` reports; empty if there is none.

    `python` is the interpreter; None for that of the rank's agent. `script` is what it runs.
    Python looks for modules beside that, so a package of the working directory is not found.
    """
    missing = _MISSING.search(text)
    if missing is None:
        return ""
    which = "its host's `python`" if python is None else f"`python` is {python}, which"
    module = script.removeprefix("./").removesuffix(".py").replace("/", ".")
    own = f"if it is your own, start python -m {module}, as Python looks beside {script}; else "
    own = "" if module.startswith(".") or "." not in module else own
    return f"{which} has no {missing[1]}: {own}install it there, or choose another with --python"
