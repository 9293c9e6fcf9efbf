"""Where a database is: the URLs that are taken, and how one is shown without the secrets in it.

What is taken is what SQLAlchemy reads as it is read here: of what can be read in two ways, part of
a password would be taken for a host, and said in the driver's words.
"""

import re
from typing import Final

from store.errors import StoreUnavailable

MASK: Final = "***"

_FILE: Final = re.compile(
    r"(?P<kind>sqlite(?:\+pysqlite)?://)(?P<rest>/[^?]*)?(?:\?(?P<query>.*))?", re.DOTALL
)

_SERVER: Final = re.compile(
    r"(?P<kind>postgresql(?:\+psycopg)?://)"
    # Possessive: what has an @ further on is a password, or nothing that is known.
    r"(?:(?P<user>[^:/?@]*)(?P<password>:[^@]*)?@)?+"
    r"(?P<rest>(?:\[[^/?@\]]+\]|[^:/?@\[\]]+)?(?::[0-9]*)?(?:/[^?@]*)?)"
    r"(?:\?(?P<query>.*))?",
    re.DOTALL,
)

_PLAIN: Final = frozenset(
    {
        "application_name",
        "connect_timeout",
        "dbname",
        "host",
        "hostaddr",
        "port",
        "sslmode",
        "sslrootcert",
        "target_session_attrs",
        "user",
    }
)
"""Parameters that hold no secret; any other may, even if its name is none."""


def refuse_unknown(url: str) -> None:
    """Raise `StoreUnavailable` unless `url` has the form of those that can be opened."""
    if _parts(url) is None:
        # The text itself is not repeated: it may hold a password.
        raise StoreUnavailable(
            "the database's URL is of no known kind: use sqlite:///<path> or "
            "postgresql://<user>@<host>/<database>, and write @ as %40 and ? as %3F in a password"
        )


def shown(url: str) -> str:
    """Return `url` as everybody may see it; of one that is not taken only that there is one."""
    parts = _parts(url)
    if parts is None:
        return MASK
    found = parts.groupdict("")
    user = found.get("user", "") + (f":{MASK}" if found.get("password") else "")
    place = found["kind"] + (f"{user}@" if user else "") + found["rest"]
    if not found["query"]:
        return place
    return f"{place}?{'&'.join(map(_shown_parameter, found['query'].split('&')))}"


def _parts(url: str) -> re.Match[str] | None:
    parts = _FILE.fullmatch(url) or _SERVER.fullmatch(url)
    # With ? there `host:5432/name?password=a@b` has the same form.
    return None if parts is None or "?" in (parts.groupdict().get("password") or "") else parts


def _shown_parameter(text: str) -> str:
    return text if text.partition("=")[0] in _PLAIN else MASK
