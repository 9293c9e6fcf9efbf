"""What is wrong with a field, in words for whoever wrote it and not for whoever programs pydantic.

The kind of error stays pydantic's own, for machines. A kind that is not in the table says what
pydantic says.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from api.requests import PRINTABLE_PATTERN
from muster.contracts.spec import JOB_ID_PATTERN
from muster.contracts.spec_problems import JOB_ID_WANTED
from muster.contracts.token import NAME_PATTERN, NAME_WANTED

SHOWN_LIMIT: Final = 40
"""Most characters of a value that its refusal repeats."""

UNSHOWN: Final = "this value"


_WANTED: Final[Mapping[str, str]] = {
    f"^{JOB_ID_PATTERN}$": JOB_ID_WANTED,
    f"^{NAME_PATTERN}$": NAME_WANTED,
    PRINTABLE_PATTERN: "holds characters that no line shows, such as its end: leave them out",
}
"""What a pattern asks for, in words."""


def field_words(found: Mapping[str, Any]) -> str:
    """Return the sentence for an error of pydantic's."""
    words = _WORDS.get(found["type"])
    if words is None:
        return str(found["msg"])
    return words(_shown(found), found.get("ctx", {}))


def _shown(found: Mapping[str, Any]) -> str:
    """Return the value as it was written, in ASCII; not what is long, or may be a secret."""
    value = found.get("input")
    if "secrets" in found["loc"] or not isinstance(value, str | int | float | None):
        return UNSHOWN
    shown = json.dumps(value) if value is None or isinstance(value, bool) else ascii(value)
    return shown if len(shown) <= SHOWN_LIMIT else UNSHOWN


def _no_text(shown: str, _: Mapping[str, Any]) -> str:
    return f"{shown} is no text" + ("" if shown == UNSHOWN else f': write "{shown}"')


def _no_match(_: str, context: Mapping[str, Any]) -> str:
    pattern = context["pattern"]
    return _WANTED.get(pattern, f"does not match {pattern}")


_WORDS: Final[Mapping[str, Callable[[str, Mapping[str, Any]], str]]] = {
    "extra_forbidden": lambda _, __: "there is no such field",
    "missing": lambda _, __: "is missing",
    "int_type": lambda shown, _: f"{shown} is no whole number",
    "int_parsing": lambda shown, _: f"{shown} is no whole number",
    "int_from_float": lambda shown, _: f"{shown} is no whole number",
    "float_type": lambda shown, _: f"{shown} is no number",
    "float_parsing": lambda shown, _: f"{shown} is no number",
    "finite_number": lambda _, __: "give a number that is not infinite",
    "string_type": _no_text,
    "string_pattern_mismatch": _no_match,
    "list_type": lambda shown, _: f"{shown} is no list",
    "dict_type": lambda shown, _: f"{shown} is no mapping: write NAME: VALUE",
    "literal_error": lambda shown, context: f"{shown} is not {context['expected']}",
    "greater_than_equal": lambda shown, context: f"{shown} is less than {context['ge']}",
    "less_than_equal": lambda shown, context: f"{shown} is more than {context['le']}",
}
