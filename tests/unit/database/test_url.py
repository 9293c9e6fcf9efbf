"""Which URLs name a database, and that no password is ever shown."""

import pytest

from database.engine import Database, parse_url
from database.errors import DatabaseError, DatabaseUnavailable

HUSH = "hunter2secretpw"

ACCEPTED = {
    "sqlite:///here.db": "sqlite:///here.db",
    "postgresql://there": "postgresql+psycopg://there",
    "postgresql+psycopg://me@[::1]:5432/it": "postgresql+psycopg://me@[::1]:5432/it",
    "postgresql:///it?host=%2Frun&user=me": "postgresql+psycopg:///it?host=%2Frun&user=me",
    f"postgresql://me:{HUSH}@there:5432/it": "postgresql+psycopg://me:***@there:5432/it",
    f"postgresql://me:a%40{HUSH}@there/it": "postgresql+psycopg://me:***@there/it",
}

REFUSED = [
    "",
    "nonsense",
    "mysql://there/it",
    "postgresql+asyncpg://there/it",
    f"postgresql://me:{HUSH}",
    f"postgresql://me:{HUSH}/it",
    f"postgresql:me:{HUSH}@there/it",
    f"postgresql:///me:{HUSH}@there/it",
    f"postgresql://me:a@{HUSH}@there/it",
    f"postgresql://me:a?{HUSH}@there/it",
    f"postgresql://there:5432/it?password=a@{HUSH}",
    f"postgresql://me@there/it?password={HUSH}",
    f"postgresql://me@there/it?sslpassword={HUSH}",
    f"postgresql://me@there/it?pass%77ord={HUSH}",
    f"postgresql://me@there/it?passwort={HUSH}",
    f"postgresql://me@there/it?host=a&{HUSH}=1",
]


@pytest.mark.parametrize(("url", "shown"), ACCEPTED.items())
def test_an_accepted_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert parse_url(url).render_as_string(hide_password=True) == shown


@pytest.mark.parametrize("url", REFUSED)
def test_a_refused_url_is_not_repeated(url: str) -> None:
    with pytest.raises(DatabaseUnavailable, match="the database's URL") as caught:
        Database.open(url)
    assert HUSH not in str(caught.value)


@pytest.mark.parametrize("query", ["", "?port=x", "?host=a&host=b&port=1", "?sslmode=x"])
def test_no_error_of_the_driver_repeats_the_password(query: str) -> None:
    with pytest.raises(DatabaseError) as caught:
        Database.open(f"postgresql://me:{HUSH}@127.0.0.1:1/it{query}")
    assert HUSH not in str(caught.value)
