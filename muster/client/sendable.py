"""What has the form of a request. For what has not there is a sentence, and nothing is sent."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import msgspec

from muster.client.errors import Unsendable


def bearer(token: str) -> str:
    """Return a token as a header takes it; a file that it was read from ends with a line feed."""
    stripped = token.strip()
    if not (stripped.isascii() and stripped.isprintable()):
        raise Unsendable("the token holds what no token does: copy it again, all of it")
    return f"Bearer {stripped}"


def encoded(body: object) -> bytes:
    """Return a body as JSON."""
    try:
        _refuse_nan_and_infinity(body)
        return msgspec.json.encode(body, enc_hook=os.fspath)
    except TypeError as error:
        raise Unsendable(f"this request holds what JSON cannot say: {error}") from error
    except RecursionError as error:
        raise Unsendable("this request holds itself, or lists in lists without end") from error


def _refuse_nan_and_infinity(value: object) -> None:
    """Raise `Unsendable` for what would be sent as null, and mean something else."""
    match value:
        case float() if not math.isfinite(value):
            raise Unsendable(f"this request holds {value}, and JSON knows no such number")
        case Mapping():
            for each in value.values():
                _refuse_nan_and_infinity(each)
        case list() | tuple() | set() | frozenset():
            for each in value:
                _refuse_nan_and_infinity(each)
        case _:
            pass


@contextmanager
def sendable() -> Iterator[None]:
    """Build a request inside, whatever words somebody gave for it."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise Unsendable("a text of this request is no UTF-8, and no other is sent") from error
    except httpx.InvalidURL as error:
        raise Unsendable(f"no URL can hold what is asked for: {error}") from error
