"""Where a setting is from, so that whoever has to correct it knows in which place."""

from collections.abc import Mapping

from cli.preferences import file_of, preferences
from muster.contracts.errors import InvalidEnvironment


def origin_of(name: str, environ: Mapping[str, str], said: Mapping[str, str]) -> str:
    """Return where a setting is from; one that is set and empty is not set.

    `environ` has what the file says, `said`, already.
    """
    text = environ.get(name)
    if not text:
        return "default"
    return "file" if said.get(name) == text else "environment"


def placed(error: InvalidEnvironment, environ: Mapping[str, str]) -> InvalidEnvironment:
    """Return the error with the file in its sentence, if that is where the setting is from."""
    if origin_of(error.name, environ, preferences(environ)) != "file":
        return error
    way = f"correct it in {file_of(environ)} or take it out"
    return InvalidEnvironment(error.name, error.value, error.wanted, way)
