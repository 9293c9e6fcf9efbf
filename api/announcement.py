"""What the headers of a request say of its body, before there is any of it."""

from collections.abc import Mapping


def media_type(headers: Mapping[str, str]) -> str:
    """Return what the body is said to be, in small letters and without parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def has_body(headers: Mapping[str, str]) -> bool:
    """Whether one is to come."""
    return "transfer-encoding" in headers or length_bytes(headers) > 0


def length_bytes(headers: Mapping[str, str]) -> int:
    """Return how long it is said to be; 0 if that is not said, as of what comes in chunks.

    `int` takes more than HTTP does. The parser has refused before what is not digits alone, and a
    length that is said twice, or beside `Transfer-Encoding`.
    """
    return int(headers.get("content-length", "0"))
