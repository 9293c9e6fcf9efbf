"""How the text of a variable becomes a value, or a refusal that says what was wanted.

A variable that is set and empty is not set: so a service can be kept from handing on its own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from muster.contracts.errors import InvalidEnvironment

Word = TypeVar("Word", bound=str)


def integer(
    environ: Mapping[str, str], name: str, default: int, *, low: int, high: int = 2**63 - 1
) -> int:
    """Return a whole number from `low` to `high`, `default` for a variable that is not set.

    Raises `InvalidEnvironment`, as all here do.
    """
    text = environ.get(name)
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        raise InvalidEnvironment(name, text, "a whole number") from None
    if not low <= value <= high:
        raise InvalidEnvironment(name, text, f"between {low} and {high}")
    return value


def optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    """Return a whole number of 0 or more, None for a variable that is not set."""
    return integer(environ, name, 0, low=0) if environ.get(name) else None


def number(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return a number of seconds, 0 or more."""
    text = environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise InvalidEnvironment(name, text, "a number") from None
    if not math.isfinite(value) or value < 0:
        raise InvalidEnvironment(name, text, "a number of seconds, 0 or more")
    return value


def choice(environ: Mapping[str, str], name: str, words: Sequence[Word], default: Word) -> Word:
    """Return which of `words` a variable names."""
    text = environ.get(name)
    if not text:
        return default
    for word in words:
        if word == text:
            return word
    raise InvalidEnvironment(name, text, f"one of {', '.join(words)}")


def switch(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a variable says yes; one that is not set does not."""
    text = environ.get(name, "")
    if text.lower() in {"1", "true", "yes"}:
        return True
    if text.lower() in {"", "0", "false", "no"}:
        return False
    raise InvalidEnvironment(name, text, "1 or 0")


def is_http(url: str) -> bool:
    """Whether a client could ask there; whatever the text, this raises nothing.

    With a user in it, it would be told by every error, and be shown in place of the token.
    """
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  raises for what is no port
    except ValueError:
        return False
    is_place = bool(parts.hostname) and "@" not in parts.netloc and not set("?#") & set(url)
    return parts.scheme in {"http", "https"} and is_place and url.isprintable()
