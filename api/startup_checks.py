"""What must be true before the service listens; also run by ``python -P -m api --check``.

A loopback address is reachable from this machine only. Any other address needs a token, and TLS so
that the token cannot be read on the way. Checking changes nothing: no database is created.
"""

import ipaddress
import json
import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from muster.contracts.errors import MusterError
from muster.contracts.location import S3Location
from muster.contracts.settings.services import AccessSettings, S3Settings, ServiceSettings
from muster.contracts.token import Scope
from muster.host.limits import usable_processors
from muster.host.ports import AddressNotLocal

ENCODINGS: Final = ("UTF8", "SQL_ASCII")
"""These keep every text: the second one stores the bytes that we send."""

_CREATE_ONE: Final = "create one with `muster token create NAME --scope admin`"


class StartupProblem(MusterError):
    """The service cannot start with these settings."""

    def __init__(self, check: str, what: str, why: str, next_step: str) -> None:
        self.check = check
        """What was checked: "settings", "address", "tls", "token", "exposure" or "database"."""
        self.what = what
        self.why = why
        self.next_step = next_step
        super().__init__(f"{what}: {why}; {next_step}")


def check_certificate(certfile: Path, keyfile: Path | None) -> None:
    """Raise `StartupProblem` unless a server can load these files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password, OpenSSL does not ask for one at the terminal.
        context.load_cert_chain(certfile, keyfile, password="")
    except OSError as error:
        raise StartupProblem(
            "tls",
            f"cannot load the certificate {certfile} and its key {keyfile or certfile}",
            error.strerror or str(error),
            "set MUSTER_TLS_CERTFILE to a PEM file with the certificate chain, and "
            "MUSTER_TLS_KEYFILE to one with its key, without a password",
        ) from error


def check_listening(
    settings: ServiceSettings, access: AccessSettings, has_token: Callable[[], bool]
) -> str:
    """Return the address to listen on.

    Raises `AddressNotLocal`, and `StartupProblem` if it is not safe to listen there, or if tokens
    are required and there is none.
    """
    try:
        address = str(socket.getaddrinfo(settings.host, None)[0][4][0])
    except OSError as error:
        raise AddressNotLocal(settings.host, error) from error
    is_exposed = not ipaddress.ip_address(address).is_loopback
    is_token_needed = access.require_token or is_exposed
    is_token_missing = is_token_needed and access.token_sha256 is None and not has_token()
    if access.require_token and is_token_missing:
        raise StartupProblem(
            "token",
            "refusing to start with MUSTER_REQUIRE_TOKEN",
            "there is no token, so no one could use the service or create a token",
            f"{_CREATE_ONE} while the service runs without MUSTER_REQUIRE_TOKEN, or set "
            "MUSTER_TOKEN",
        )
    what = f"refusing to listen on {settings.host}, which other machines can reach"
    if is_exposed and is_token_missing:
        raise StartupProblem(
            "exposure",
            what,
            "there is no token",
            f"{_CREATE_ONE} while the service runs on 127.0.0.1, or set MUSTER_TOKEN; or leave "
            "MUSTER_HOST unset and use an SSH tunnel",
        )
    if is_exposed and access.tls_certfile is None and not access.allow_plain_http:
        raise StartupProblem(
            "exposure",
            what,
            "tokens would cross the network unencrypted",
            "set MUSTER_TLS_CERTFILE and MUSTER_TLS_KEYFILE, or set MUSTER_ALLOW_PLAIN_HTTP=1 if "
            "a proxy does TLS",
        )
    return address


def run_checks(environ: Mapping[str, str], *, is_store_asked: bool = False) -> int:
    """Print the result of all checks as one JSON object; return 1 if there is a problem."""
    problems: list[dict[str, str]] = []
    address: str | None = None
    database: dict[str, object] | None = None
    has_admin_token = False
    stores: list[dict[str, str]] = []
    try:
        settings = ServiceSettings.read(environ, cores=usable_processors())
        access = AccessSettings.read(environ)
    except MusterError as error:
        problems.append(_described(error, "settings"))
    else:
        from database.errors import SchemaRefused  # noqa: PLC0415
        from database.tokens import is_any_token  # noqa: PLC0415  imports SQLAlchemy

        has_token = True  # as far as is known
        has_admin_token = access.token_sha256 is not None
        try:
            database = _described_database(settings.database)
            has_token = is_any_token(settings.database, Scope.READ)
            has_admin_token |= is_any_token(settings.database, Scope.ADMIN)
        except SchemaRefused as error:
            problems.append(_described(error, "database"))
        except MusterError as error:
            hint = "check MUSTER_DATABASE_URL; unset, it is a file in the data directory"
            problems.append(_described(error, "database", hint))
        try:
            if access.tls_certfile is not None:
                check_certificate(access.tls_certfile, access.tls_keyfile)
            address = check_listening(settings, access, lambda: has_token)
        except MusterError as error:
            problems.append(_described(error, "address"))
        if is_store_asked:
            stores = list(_described_stores(settings))
    report = {
        "problems": problems,
        "address": address,
        "database": database,
        "has_admin_token": has_admin_token,
        "stores": stores,
    }
    print(json.dumps(report))  # noqa: T201  the result of this command
    return 1 if problems else 0


def _described(error: MusterError, check: str, next_step: str = "") -> dict[str, str]:
    if isinstance(error, StartupProblem):
        check, what, why, next_step = error.check, error.what, error.why, error.next_step
        return {"check": check, "what": what, "why": why, "next": next_step}
    return {"check": check, "what": str(error), "why": "", "next": next_step}


def _described_stores(settings: ServiceSettings) -> Iterator[dict[str, str]]:
    """Yield what was seen of the default places in a store, or of S3_BUCKET, and what is wrong."""
    from muster.objects import client, probe  # noqa: PLC0415  slow

    client.S3Client.retry_seconds = client.BRIEF_RETRY_SECONDS
    store = S3Settings.read(os.environ)
    # By place, whether jobs write there.
    places = {settings.dataset_dir: False, settings.checkpoint_dir: True}
    stored = {place: writes for place, writes in places.items() if isinstance(place, S3Location)}
    if not stored and store.endpoint:
        stored[S3Location(store.bucket)] = True
    for where, is_written in stored.items():
        seen, problem = f"{where} can be read", ""
        try:
            if next(client.default_client().list(where), None) is None:
                seen += ", and nothing is there yet"
            if is_written:
                probe.check_store(client.default_client(), where)
                seen = f"{where} can be written to by one writer at a time"
                seen += f" (not tried: {probe.NOT_TRIED})"
        except MusterError as error:
            seen, problem = str(where), str(error)
        yield {"seen": seen, "problem" if where in places else "warning": problem}


def _described_database(url: str | Path) -> dict[str, object]:
    """Return schema and server of the database at `url`; raise what makes it unusable."""
    from database import HEAD  # noqa: PLC0415
    from database.engine import existing, parse_url  # noqa: PLC0415  imports SQLAlchemy
    from database.tables import check_revision  # noqa: PLC0415

    with existing(url) as database:
        found = database.revision() if database else None
        facts = database.facts() if database else {}
    check_revision(found, parse_url(url).render_as_string(hide_password=True))
    if facts.get("is_read_only"):
        why = "its server is a hot standby, or has default_transaction_read_only set"
        fix = "name the primary in MUSTER_DATABASE_URL, or add target_session_attrs=read-write"
        raise StartupProblem("database", "the database takes no writes", why, fix)
    if (encoding := facts.get("encoding", "UTF8")) not in ENCODINGS:
        what, why = f"the database has the encoding {encoding}", "it cannot hold every text"
        fix = "make another one with `CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0`"
        raise StartupProblem("database", what, why, fix)
    kind = parse_url(url).get_backend_name()
    return {"kind": kind, "revision": found, "expected_revision": HEAD, **facts}
