"""Settings in a file: for whoever does not want to export them in every terminal.

``~/.config/muster/config.toml`` has the names of the environment, which goes before it. A file of
the present directory is not read: whoever unpacks a stranger's work would send a token where that
says.
"""

import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from cli.misuse import Misuse

NAME: Final = Path("muster", "config.toml")

FOR_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class InvalidPreferences(Misuse):
    """The file of settings cannot be read, or says what cannot be meant."""


def file_of(environ: Mapping[str, str]) -> Path:
    """Return where the file is, or would be."""
    home = Path(environ.get("HOME", "/"))
    return Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / NAME


def preferences(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the file says, nothing if there is none; raises `InvalidPreferences`."""
    file = file_of(environ)
    try:
        content = file.read_bytes()
    except OSError:  # there is none, or its home is another user's
        return {}
    said = {name: _text(file, name, value) for name, value in _parsed(file, content).items()}
    _check(file, said)
    return said


def settle(environ: MutableMapping[str, str]) -> None:
    """Set what the file says and the environment does not; raises `InvalidPreferences`."""
    for name, text in preferences(environ).items():
        environ.setdefault(name, text)


def _parsed(file: Path, content: bytes) -> dict[str, object]:
    import tomllib  # noqa: PLC0415  most people have no such file

    try:
        return tomllib.loads(content.decode())
    except ValueError as error:
        raise InvalidPreferences(f"{file} is no TOML: {error}") from error


def _text(file: Path, name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidPreferences(f"{file}: {name} is to be a text, a number, true or false")


def _check(file: Path, said: Mapping[str, str]) -> None:
    from cli.settings import SECRETS, misspelt, names  # noqa: PLC0415  as above

    for name in said:
        if name not in names():
            near = misspelt(name)
            hint = (
                f"did you mean {near}?"
                if near
                else "take it out, and muster config show lists those there are"
            )
            raise InvalidPreferences(f"{file}: {name} is no setting: {hint}")
    if SECRETS & set(said) and file.stat().st_mode & FOR_OTHERS:
        raise InvalidPreferences(f"{file} holds secrets and others may read it: chmod go= {file}")
