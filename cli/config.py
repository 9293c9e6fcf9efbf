"""Every setting: its value, its origin, the configuration file, `muster config`, reference page.

`muster.contracts.settings.services` declares them as environment variables.
``~/.config/muster/config.toml`` may hold the same names, and the environment wins. A file in the
working directory is not read: unpacked foreign code could redirect commands, and with them the
token, to another server.
"""

import os
import re
import stat
from collections.abc import Mapping, MutableMapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import click

from cli.errors import Misuse
from cli.output import Output, output_option, show, table
from muster.contracts.errors import InvalidEnvironment
from muster.contracts.location import SCHEME
from muster.host.limits import usable_processors


class Setting(NamedTuple):
    """One environment variable."""

    meaning: str
    default: str
    """As the reference page shows it."""
    field: str | None
    """Its name in the class of settings that declares it; None if none does."""
    is_place: bool = False  # a path, or a place in a store


# What no settings class declares.
_OTHER_VARIABLES: Final[Mapping[str, str]] = {
    "MUSTER_SECRET_ENV": "Variables of the services that jobs may use as secrets",
    "MUSTER_URL": "For commands and clients: URL of the API, without a user in it",
    "MUSTER_CA_FILE": "For commands and clients: the certificates to trust",
    "MUSTER_CLUSTER_NAME": "For `muster mesh` and `muster.mesh`: the name of the household",
    "MUSTER_CLUSTER_KEY": "As above: the secret of the household, at least 16 characters",
}

_COMPUTED_DEFAULTS: Final[Mapping[str, str]] = {
    "MUSTER_DATA_DIR": "`~/.local/share/muster`; `./.muster` with make",
    "MUSTER_DATABASE_URL": "SQLite in the data directory",
    "MUSTER_SLOTS": "twice the usable processors",
    "CHECKPOINT_DIR": "`checkpoints` in the data directory; `./checkpoints` by hand",
    "DATASET_DIR": "`./data/shards`",
    "MUSTER_RANK_PORTS": "any free ports",
    "MUSTER_TLS_KEYFILE": "the certificate's file",
    "MUSTER_CACHE_DIR": "`~/.cache/muster/shards`",
    "MUSTER_URL": "this machine",
    "MUSTER_CA_FILE": "those of the system",
    "MUSTER_CLUSTER_NAME": "home",
    "MUSTER_CLUSTER_KEY": "`cluster.key` in the data directory",
}

_SECRETS: Final = frozenset(
    {"MUSTER_DATABASE_URL", "MUSTER_TOKEN", "S3_ACCESS_KEY", "S3_SECRET_KEY", "MUSTER_CLUSTER_KEY"}
)

MASK: Final = "***"

NEAR: Final = 0.85
"""Similarity from which an unknown name counts as a misspelt setting."""


@cache
def settings() -> Mapping[str, Setting]:
    """Return every setting by the name of its variable."""
    # Imported here because every command imports this module, and few need msgspec.
    import msgspec  # noqa: PLC0415

    from muster.contracts.settings import services as declared  # noqa: PLC0415
    from muster.contracts.settings.variables import bare_type, variables_of  # noqa: PLC0415

    found = {}
    for kind in (declared.ServiceSettings, declared.AccessSettings, declared.S3Settings):
        defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
        for field, (variable, hint) in variables_of(kind).items():
            text = _text(defaults[field])
            default = _COMPUTED_DEFAULTS.get(variable.name) or (f"`{text}`" if text else "none")
            is_place = Path in (bare_type(hint), *get_args(bare_type(hint)))
            found[variable.name] = Setting(variable.meaning, default, field, is_place)
    for name, meaning in _OTHER_VARIABLES.items():
        found[name] = Setting(meaning, _COMPUTED_DEFAULTS.get(name, "none"), None)
    found["MUSTER_CA_FILE"] = found["MUSTER_CA_FILE"]._replace(is_place=True)
    return found


def config_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the configuration file, which may not exist."""
    home = Path(environ.get("HOME", "/"))
    return Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "muster" / "config.toml"


def read_config_file(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the configuration file; raises `Misuse`."""
    file = config_file(environ)
    try:
        content = file.read_bytes()
    except OSError:  # usually there is none
        return {}
    import tomllib  # noqa: PLC0415

    try:
        parsed = tomllib.loads(content.decode())
    except ValueError as error:
        raise Misuse(f"{file} is not valid TOML: {error}") from error
    values = {}
    for name, value in parsed.items():
        if name not in settings():
            upper = name.upper()
            near = nearest_setting(upper) or nearest_setting(f"MUSTER_{upper}")
            hint = f"did you mean {near}?" if near else "see docs/reference/configuration.md"
            raise Misuse(f"{file}: {name} is not a setting: {hint}")
        if not isinstance(value, str | int | float):
            raise Misuse(f"{file}: {name} must be a string, a number, true or false")
        values[name] = str(int(value)) if isinstance(value, bool) else str(value)
        place = re.sub(r"^sqlite(\+\w+)?:///", "", values[name])
        is_place = settings()[name].is_place or place != values[name]
        if is_place and place and not place.startswith(("/", "~", SCHEME)):  # relative to what?
            raise Misuse(f"{file}: {name} must be a whole path, such as /{place} or ~/{place}")
    if _SECRETS & values.keys() and file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise Misuse(f"{file} holds secrets and others may read it: chmod go= {file}")
    return values


def apply_config_file(environ: MutableMapping[str, str]) -> None:
    """Set every variable that the file has and the environment has not; the same errors."""
    for name, text in read_config_file(environ).items():
        environ.setdefault(name, text)


def origin_of(name: str, environ: Mapping[str, str], in_file: Mapping[str, str]) -> str:
    """Return "default", "file" or "environment"; an empty variable counts as unset."""
    text = environ.get(name)
    if not text:
        return "default"
    return "file" if in_file.get(name) == text else "environment"


def with_origin(error: InvalidEnvironment, environ: Mapping[str, str]) -> InvalidEnvironment:
    """Return an error that names the configuration file if the value comes from there."""
    if origin_of(error.name, environ, read_config_file(environ)) != "file":
        return error
    way = f"correct it in {config_file(environ)} or take it out"
    return InvalidEnvironment(error.name, error.value, error.wanted, way)


def nearest_setting(name: str) -> str | None:
    """Return the setting that a misspelt name probably means."""
    near = get_close_matches(name, settings(), n=1, cutoff=NEAR)
    return near[0] if near else None


def setting_values(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the effective value of every setting, secrets masked; raises `InvalidEnvironment`."""
    import msgspec  # noqa: PLC0415  as in `settings`

    from muster.contracts.settings import services as declared  # noqa: PLC0415

    services = declared.ServiceSettings.read(environ, cores=usable_processors())
    access, store = declared.AccessSettings.read(environ), declared.S3Settings.read(environ)
    asdict = msgspec.structs.asdict
    fields = {**asdict(services), **asdict(access), **asdict(store)}
    values = {
        name: _text(fields[setting.field]) if setting.field else environ.get(name) or None
        for name, setting in settings().items()
    }
    # With port 0, only a running `up` knows the URL.
    is_any_port = services.port == 0 and not environ.get("MUSTER_URL")
    values["MUSTER_URL"] = None if is_any_port else declared.api_url(environ)
    place = services.database
    values["MUSTER_DATABASE_URL"] = mask_password(place) if isinstance(place, str) else str(place)
    for name in _SECRETS - {"MUSTER_DATABASE_URL"}:
        values[name] = MASK if environ.get(name) else None
    return values


def mask_password(url: str) -> str:
    """Return a database URL without its password and parameters.

    A URL that might be taken apart in two ways is masked as a whole.
    """
    kind = re.match(r"(sqlite|postgresql)(\+\w+)?://", url)
    place, question, query = url.partition("?")
    if kind is None or "@" in query:
        return MASK
    if kind[1] == "postgresql":
        userinfo, at, host = place[kind.end() :].rpartition("@")
        # What follows the colon must be a port, and no part of a password.
        if not re.fullmatch(r"(\[[0-9a-f:]*\]|[^:/]*)(:\d+)?(/[^:]*)?", host):
            return MASK
        user, colon, _ = userinfo.partition(":")
        place = f"{kind[0]}{user}{colon and f':{MASK}'}{at}{host}"
    return place + (question and f"?{MASK}")


@click.group()
def config() -> None:
    """Show every setting and its origin."""


@config.command("show")
@click.option("--origin", is_flag=True, help="Also show where each value comes from.")
@output_option
def show_settings(*, origin: bool, output: Output) -> None:
    """Show every setting and its value, and where it comes from on request.

    Settings are environment variables, and those that are not set are taken from
    ~/.config/muster/config.toml. Commands use URL and certificate of the `muster up`
    of their data directory. Secrets are masked. Exit code 2 if a value is invalid.
    """
    from cli.services.record import address_of, find_own_services  # noqa: PLC0415  imports msgspec

    in_file = read_config_file(os.environ)
    url, ca_file = address_of(find_own_services())
    from_up = {"MUSTER_URL": url, "MUSTER_CA_FILE": ca_file}
    body = [
        {
            "name": name,
            "value": from_up.get(name) or value,
            "origin": "muster up" if from_up.get(name) else origin_of(name, os.environ, in_file),
        }
        for name, value in setting_values(os.environ).items()
    ]
    shown = ("name", "origin", "value") if origin else ("name", "value")
    lines = table(shown, ([row[name] for name in shown] for row in body))
    show(output, body, lines, settings())
    for name in os.environ:
        is_unknown = name.startswith("MUSTER_") and name not in settings()
        if is_unknown and (near := nearest_setting(name)):
            click.echo(f"{name} is not a setting: did you mean {near}?", err=True)


def _text(value: Any) -> str | None:  # noqa: ANN401  a value of any type
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
