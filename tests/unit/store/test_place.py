"""Which URLs name a database, and that none is shown with a secret in it."""

import pytest
from sqlalchemy import make_url

from store.database import Database
from store.errors import StoreError, StoreUnavailable
from store.place import MASK, refuse_unknown, shown

HUSH = "hunter2secretpw"

TAKEN = {
    "sqlite:///here.db": "sqlite:///here.db",
    "sqlite:////there/a:b@c.db": "sqlite:////there/a:b@c.db",
    "postgresql://there": "postgresql://there",
    "postgresql+psycopg://me@[::1]:5432/it": "postgresql+psycopg://me@[::1]:5432/it",
    "postgresql:///it?host=%2Frun&user=me": "postgresql:///it?host=%2Frun&user=me",
    f"postgresql://me:{HUSH}@there:5432/it": "postgresql://me:***@there:5432/it",
    f"postgresql://me:a/{HUSH}@there/it": "postgresql://me:***@there/it",
    f"postgresql://me@there/it?password={HUSH}&sslmode=require": (
        "postgresql://me@there/it?***&sslmode=require"
    ),
    f"postgresql://me@there:5432/it?password=a@{HUSH}": "postgresql://me@there:5432/it?***",
    f"postgresql://me@there/it?password=a&{HUSH}": "postgresql://me@there/it?***&***",
    f"postgresql://me@there/it?pass%77ord={HUSH}": "postgresql://me@there/it?***",
    f"postgresql://me@there/it?sslpassword={HUSH}": "postgresql://me@there/it?***",
}

REFUSED = [
    "nonsense",
    "mysql://there/it",
    "sqlite://here.db",
    f"postgresql://me:{HUSH}",
    f"postgresql://me:{HUSH}/it",
    f"postgresql:me:{HUSH}@there/it",
    f"postgresql:///me:{HUSH}@there/it",
    f"postgresql://me:a@{HUSH}@there/it",
    f"postgresql://me:a?{HUSH}@there/it",
    f"postgresql://there:5432/it?password=a@{HUSH}",
]


@pytest.mark.parametrize(("url", "text"), TAKEN.items())
def test_a_url_is_shown_without_what_may_be_secret(url: str, text: str) -> None:
    refuse_unknown(url)
    make_url(url)
    assert shown(url) == text


@pytest.mark.parametrize("url", REFUSED)
def test_what_names_no_database_is_refused_and_never_repeated(url: str) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        Database.open(url)
    assert "is of no known kind" in str(caught.value)
    assert url not in str(caught.value)
    assert HUSH not in str(caught.value)
    assert shown(url) == MASK


@pytest.mark.parametrize(
    "query",
    ["password={}", "sslpassword={}", "port=x", "passwort={}", "plugin={}", "host=a&host=b&port=1"],
)
def test_no_error_has_the_password_of_a_url_in_it(query: str) -> None:
    """Whatever the driver says of it: nobody listens at this port, and some are no parameters."""
    url = f"postgresql://me:{HUSH}@127.0.0.1:1/it?{query.format(HUSH)}"
    with pytest.raises(StoreError) as caught:
        Database.open(url)
    assert HUSH not in str(caught.value)
