"""Every setting, declared once: environment, configuration file, `muster config`, reference page.

Settings are environment variables. ``~/.config/muster/config.toml`` may hold the same names, and
the environment wins. A file in the working directory is not read: unpacked foreign code could
redirect commands, and with them the token, to another server.
"""

import os
import stat
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

import click

from cli.errors import ExitCode, Misuse
from cli.output import UNKNOWN, Output, output_option, show, table
from muster.contracts.errors import InvalidEnvironment

if TYPE_CHECKING:
    from muster.contracts.settings import ServiceSettings


class Setting(NamedTuple):
    """One environment variable; `field` is its name in `ServiceSettings` or `DoorSettings`."""

    default: str
    description: str
    field: str = ""
    is_secret: bool = False


SETTINGS: Final[Mapping[str, Setting]] = {
    "MUSTER_DATA_DIR": Setting(
        "`~/.local/share/muster`; `./.muster` with make",
        "Directory of the database, logs, secrets and small data sets.",
        "data_dir",
    ),
    "MUSTER_DATABASE_URL": Setting(
        "SQLite in the data directory",
        "`sqlite:///PATH` or `postgresql+psycopg://USER@HOST/NAME`. In a password write `@` as "
        "`%40` and `?` as `%3F`.",
        "database_url",
        is_secret=True,
    ),
    "MUSTER_HOST": Setting(
        "`127.0.0.1`",
        "Address the API listens on. Other machines need tokens and TLS: see SECURITY.md.",
        "host",
    ),
    "MUSTER_PORT": Setting("`8000`", "Port of the API; 0 takes any free port.", "port"),
    "MUSTER_SLOTS": Setting(
        "twice the processors",
        "Ranks that run at once. Further jobs wait in `QUEUED`; a larger job runs alone.",
        "slots",
    ),
    "CHECKPOINT_DIR": Setting(
        "`./checkpoints`", "Checkpoints of jobs that name none.", "checkpoint_dir"
    ),
    "DATASET_DIR": Setting(
        "`./data/shards`", "Data of jobs that name no directory.", "dataset_dir"
    ),
    "MUSTER_ORPHAN_TIMEOUT": Setting(
        "`120`",
        "Seconds that ranks go on without a coordinator before they checkpoint and exit.",
        "orphan_timeout_seconds",
    ),
    "MUSTER_TOKEN": Setting(
        "none",
        "For commands and clients: the token they show. For a service: one more token of scope "
        "admin, unless a service issued it.",
        is_secret=True,
    ),
    "MUSTER_REQUIRE_TOKEN": Setting(
        "`0`", "`1`: this user, too, needs a token on this machine.", "require_token"
    ),
    "MUSTER_ALLOWED_HOSTS": Setting(
        "none", "Other host names of the API, separated by commas.", "allowed_hosts"
    ),
    "MUSTER_TLS_CERTFILE": Setting(
        "none", "PEM file with the certificate of the API and its chain.", "tls_certfile"
    ),
    "MUSTER_TLS_KEYFILE": Setting(
        "the certificate's file", "PEM file with the key, without a password.", "tls_keyfile"
    ),
    "MUSTER_ALLOW_PLAIN_HTTP": Setting(
        "`0`", "`1`: a proxy in front of the API does TLS.", "allow_plain_http"
    ),
    "MUSTER_REQUESTS_PER_SECOND": Setting(
        "`100`", "Requests of one client per second, on average.", "requests_per_second"
    ),
    "MUSTER_REQUESTS_AT_ONCE": Setting(
        "`64`", "Concurrent requests of one client, open streams included.", "requests_at_once"
    ),
    "MUSTER_CONNECTIONS_AT_ONCE": Setting(
        "`128`",
        "Connections from one other machine, or from one other user of this machine.",
        "connections_at_once",
    ),
    "MUSTER_SECRET_ENV": Setting(
        "none", "Variables of the services that jobs may use as secrets, separated by commas."
    ),
    "MUSTER_URL": Setting(
        "this machine", "For commands and clients: URL of the API, without a user in it."
    ),
    "MUSTER_CA_FILE": Setting(
        "those of the system", "For commands and clients: the certificates to trust."
    ),
}

MASK: Final = "***"

NEAR: Final = 0.85
"""Similarity from which an unknown name counts as a misspelt setting."""


_PAGE: Final = """\
# Configuration

<!-- Written by `python -P -m cli.reference` from cli/config.py. -->

Settings are environment variables. `~/.config/muster/config.toml` may hold the same names; the
environment wins. `muster config show --origin` prints every value and where it comes from.

| variable | default | meaning |
|---|---|---|
"""


class InvalidConfigFile(Misuse):
    """The configuration file cannot be read or used."""


def service_settings() -> "ServiceSettings":
    """Return the settings of this environment's services; raises `InvalidEnvironment`."""
    from muster.contracts.settings import ServiceSettings  # noqa: PLC0415  slow: main imports us

    return ServiceSettings.read(os.environ, cores=os.cpu_count() or 1)


def config_file(environ: Mapping[str, str]) -> Path:
    """Return the path of the configuration file, which may not exist."""
    home = Path(environ.get("HOME", "/"))
    return Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "muster" / "config.toml"


def read_config_file(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of the configuration file; raises `InvalidConfigFile`."""
    file = config_file(environ)
    try:
        content = file.read_bytes()
    except OSError:  # usually there is none
        return {}
    import tomllib  # noqa: PLC0415

    try:
        parsed = tomllib.loads(content.decode())
    except ValueError as error:
        raise InvalidConfigFile(f"{file} is not valid TOML: {error}") from error
    values = {}
    for name, value in parsed.items():
        if name not in SETTINGS:
            near = nearest_setting(name)
            hint = f"did you mean {near}?" if near else "see muster config show for all settings"
            raise InvalidConfigFile(f"{file}: {name} is not a setting: {hint}")
        if not isinstance(value, str | int | float):
            raise InvalidConfigFile(f"{file}: {name} must be a string, a number, true or false")
        values[name] = str(int(value)) if isinstance(value, bool) else str(value)
    has_secret = any(SETTINGS[name].is_secret for name in values)
    if has_secret and file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidConfigFile(f"{file} holds secrets and others may read it: chmod go= {file}")
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
    near = get_close_matches(name, SETTINGS, n=1, cutoff=NEAR)
    return near[0] if near and near[0] != name else None


def setting_values(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the effective value of every setting, secrets masked; raises `InvalidEnvironment`."""
    import msgspec  # noqa: PLC0415  as above

    from muster.contracts.settings import AccessSettings, ServiceSettings, api_url  # noqa: PLC0415

    services = ServiceSettings.read(environ, cores=os.cpu_count() or 1)
    door = AccessSettings.read(environ)
    fields = {**msgspec.structs.asdict(services), **msgspec.structs.asdict(door)}
    values = {
        name: _text(fields[setting.field]) if setting.field else environ.get(name) or None
        for name, setting in SETTINGS.items()
    }
    # With port 0, only a running `up` knows the URL.
    is_any_port = services.port == 0 and not environ.get("MUSTER_URL")
    values["MUSTER_URL"] = None if is_any_port else api_url(environ)
    values["MUSTER_DATABASE_URL"] = mask_password(services.database_url)
    values["MUSTER_TOKEN"] = MASK if environ.get("MUSTER_TOKEN") else None
    return values


def mask_password(url: str) -> str:
    """Return a database URL without its password and parameters.

    A URL that might be taken apart in two ways is masked as a whole.
    """
    try:
        parts = urlsplit(url)
        kind = parts.scheme.partition("+")[0]
        # An @ after the host: a password with an unquoted / or ?. A bad port raises ValueError.
        is_doubtful = "@" in url.removeprefix(f"{parts.scheme}://{parts.netloc}") or parts.port == 0
    except ValueError:
        return MASK
    if kind not in {"sqlite", "postgresql"} or (kind == "postgresql" and is_doubtful):
        return MASK
    user, at, host = parts.netloc.rpartition("@")
    shown_user = f"{user.partition(':')[0]}:{MASK}" if ":" in user else user
    query = f"?{MASK}" if parts.query else ""
    return f"{parts.scheme}://{shown_user}{at}{host}{parts.path}{query}"


def reference_page() -> str:
    """Return docs/reference/configuration.md."""
    rows = [f"| `{name}` | {it.default} | {it.description} |" for name, it in SETTINGS.items()]
    return _PAGE + "\n".join(rows) + "\n"


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
    # Imported here: `service_record` needs this module.
    from cli.service_record import address_of, find_own_services  # noqa: PLC0415

    in_file = read_config_file(os.environ)
    valid, errors = _valid_values(os.environ)
    url, ca_file = address_of(find_own_services())
    from_up = {"MUSTER_URL": url, "MUSTER_CA_FILE": ca_file}
    body = [
        {
            "name": name,
            "value": errors[name].value if name in errors else from_up.get(name) or valid[name],
            "origin": "muster up" if from_up.get(name) else origin_of(name, os.environ, in_file),
            "problem": f"is not {errors[name].wanted}" if name in errors else None,
        }
        for name in dict.fromkeys([*valid, *errors])
    ]
    columns = ("name", "origin", "value") if origin else ("name", "value")
    rows = ([_cell(row, column) for column in columns] for row in body)
    show(output, body, table(columns, rows), (str(row["name"]) for row in body))
    for sentence in _misspelt(os.environ):
        click.echo(sentence, err=True)
    for error in errors.values():
        click.echo(f"muster: {with_origin(error, os.environ)}", err=True)
    if errors:
        sys.exit(ExitCode.USAGE)


def _valid_values(
    environ: Mapping[str, str],
) -> tuple[dict[str, str | None], dict[str, InvalidEnvironment]]:
    """Return all values, with the default in place of each invalid one, and the errors."""
    remaining, errors = dict(environ), dict[str, InvalidEnvironment]()
    while True:
        try:
            return setting_values(remaining), errors
        except InvalidEnvironment as error:
            errors[error.name] = error
            del remaining[error.name]


def _cell(row: Mapping[str, str | None], column: str) -> str:
    text = row[column]
    if column == "value" and row["problem"]:
        return f"{text!r} {row['problem']}"
    return text or UNKNOWN


def _misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    for name in environ:
        if name.startswith("MUSTER_") and name not in SETTINGS and (near := nearest_setting(name)):
            yield f"{name} is not a setting: did you mean {near}?"


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
