"""Every setting of the services and of the commands, by the variable that it is read from."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

import msgspec

from muster.contracts.environ import (
    CA_FILE,
    ORPHAN_TIMEOUT,
    TOKEN,
    DoorSettings,
    ServiceSettings,
    api_url,
)
from muster.contracts.errors import InvalidEnvironment
from muster.contracts.secrets import LENT
from store.place import MASK, shown

DATABASE_URL: Final = "MUSTER_DATABASE_URL"
SECRETS: Final = frozenset({TOKEN, DATABASE_URL})
"""What may hold a secret."""

_NOT_AS_THE_FIELD: Final[Mapping[str, str]] = {
    "checkpoint_dir": "CHECKPOINT_DIR",
    "dataset_dir": "DATASET_DIR",
    "orphan_timeout_seconds": ORPHAN_TIMEOUT,
    "token_sha256": TOKEN,
}
"""Variables that are not MUSTER_ and the name of their field."""

LIKE: Final = 0.85
"""How near a word has to be to the name of a setting to be taken for it, misspelt."""


def values(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return each setting as it holds, without secrets; raises `InvalidEnvironment`."""
    services = ServiceSettings.read(environ, cores=os.cpu_count() or 1)
    door = DoorSettings.read(environ)
    fields = {**msgspec.structs.asdict(services), **msgspec.structs.asdict(door)}
    found = {variable_of(field): _text(value) for field, value in fields.items()}
    return {
        **found,
        DATABASE_URL: shown(services.database_url),
        TOKEN: MASK if environ.get(TOKEN) else None,  # one of another service's, too
        LENT: environ.get(LENT),
        "MUSTER_URL": _url(environ, services.port),
        CA_FILE: environ.get(CA_FILE),
    }


def sound_values(
    environ: Mapping[str, str],
) -> tuple[dict[str, str | None], dict[str, InvalidEnvironment]]:
    """Return `values` as they would hold without those that cannot be, and what is wrong with each.

    Of those that cannot be the value is the default.
    """
    sound, wrong = dict(environ), dict[str, InvalidEnvironment]()
    while True:
        try:
            return values(sound), wrong
        except InvalidEnvironment as error:
            wrong[error.name] = error
            del sound[error.name]


def names() -> list[str]:
    """Return the variables of all settings."""
    return list(values({}))


def misspelt(name: str) -> str | None:
    """Return the setting that is probably meant by a name that is none's."""
    near = get_close_matches(name, names(), n=1, cutoff=LIKE)
    return near[0] if near and near[0] != name else None


def variable_of(field: str) -> str:
    """Return the variable that a field of the services' settings is read from."""
    return _NOT_AS_THE_FIELD.get(field, f"MUSTER_{field.upper()}")


def _url(environ: Mapping[str, str], port: int) -> str | None:
    """Return which API is asked; None where `up` takes any free port, which no setting knows."""
    is_anywhere = port == 0 and not environ.get("MUSTER_URL")
    return None if is_anywhere else api_url(environ)


def _text(value: Any) -> str | None:  # noqa: ANN401  of any kind
    match value:
        case None:
            return None
        case bool():
            return str(int(value))
        case frozenset():
            return ",".join(sorted(value)) or None
        case float():
            return f"{value:g}"
        case _:
            return str(value)
