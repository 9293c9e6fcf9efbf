"""Column types that give the same values on SQLite and PostgreSQL, to the microsecond."""

from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Final

import msgspec
from sqlalchemy import BigInteger, Dialect, Enum, Integer, Text, TypeDecorator

from store.errors import StoreError

_START: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_SIGN: Final = 1 << 63

RISING: Final = BigInteger().with_variant(Integer(), "sqlite")
"""A key the database counts up itself; SQLite does so for the type INTEGER only."""


class Moment(TypeDecorator[datetime]):
    """A time as whole microseconds since 1970: exact, and ordered as integers are.

    Neither database's own type does: SQLite has none, and compares texts. A time
    without a zone is refused.
    """

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> int | None:
        del dialect
        return None if value is None else (value - _START) // _MICROSECOND

    def process_result_value(self, value: int | None, dialect: Dialect) -> datetime | None:
        del dialect
        return None if value is None else _START + value * _MICROSECOND


class Unsigned(TypeDecorator[int]):
    """A number below 2**64, such as a sum of hashes, in a column of 64 bits with a sign.

    The upper half is stored as negative numbers: exact and equal only to itself, but not ordered.
    """

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        del dialect
        if value is None:
            return None
        if not 0 <= value < _SIGN << 1:
            raise ValueError(f"{value} is not between 0 and 2**64 - 1")
        return value if value < _SIGN else value - (_SIGN << 1)

    def process_result_value(self, value: int | None, dialect: Dialect) -> int | None:
        del dialect
        return value if value is None or value >= 0 else value + (_SIGN << 1)


class Json(TypeDecorator[Any]):
    """A frozen value as JSON text, checked against its type when it is read."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:  # noqa: ANN401  a class, or dict[…] and the like
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ANN401  any kind
        del dialect
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:  # noqa: ANN401
        del dialect
        if value is None:
            return None
        try:
            return msgspec.json.decode(value, type=self.kind)
        except msgspec.MsgspecError as error:
            kind = getattr(self.kind, "__name__", self.kind)
            raise StoreError(
                f"a row holds a {kind} that this version of Muster cannot read ({error}): "
                "upgrade Muster"
            ) from error


def words(kind: type[StrEnum]) -> Enum:
    """Return the type of a column that holds the values of `kind` as plain text."""
    return Enum(
        kind,
        native_enum=False,  # a new word must not need a migration
        length=32,
        values_callable=lambda members: [member.value for member in members],
    )
