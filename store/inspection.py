"""A look at a database that changes nothing: which schema does it have, if any?"""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import make_url

from muster.contracts.token import Scope
from store.database import Database
from store.errors import StoreError
from store.place import refuse_unknown
from store.schema import HEAD
from store.tokens import Tokens

PATIENCE_SECONDS: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was seen."""

    revision: str | None
    """None: nobody has made its tables yet; the first service does."""
    wanted: str
    """Which this version of Muster has."""


def inspect(url: str) -> Inspection:
    """Look at the database at `url`; raises `StoreUnavailable` if it cannot be read."""
    return Inspection(revision=None if _is_absent(url) else _revision(url), wanted=HEAD)


def is_any_token(url: str, scope: Scope = Scope.READ) -> bool:
    """Return whether somebody has made a token that is valid for as much as this scope.

    False where nobody can look.
    """
    try:
        if _is_absent(url):
            return False
        with closing(Database.as_it_is(url, busy_timeout_seconds=PATIENCE_SECONDS)) as database:
            return Tokens(database).is_any_valid(scope)
    except StoreError:
        return False


def _is_absent(url: str) -> bool:
    """Whether it is a file that is not there: to open it would make it."""
    refuse_unknown(url)
    parsed = make_url(url)
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database
    return bool(is_file) and not Path(str(parsed.database)).exists()


def _revision(url: str) -> str | None:
    with closing(Database.as_it_is(url, busy_timeout_seconds=PATIENCE_SECONDS)) as database:
        return database.revision()
