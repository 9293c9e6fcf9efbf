"""The certificate of one's own service: whom nobody else has signed, clients have to be told of."""

import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any


def own_names(certfile: Path, keyfile: Path | None) -> Sequence[str]:
    """Return the names of a certificate whose file says all about who signed it, as clients do.

    None of one that others signed: clients know those others, or do not.
    """
    with suppress(OSError):
        shown = _shown(certfile, keyfile)
        named = shown.get("subjectAltName", ())
        return [_plain(kind, name) for kind, name in named if kind in {"DNS", "IP Address"}]
    return ()


def _shown(certfile: Path, keyfile: Path | None) -> Mapping[str, Any]:
    """Return the certificate as a client sees it that trusts this file alone.

    Raises `ssl.SSLError`, an `OSError`, if it does not trust it then.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A key with a password would else ask for it at the terminal.
    server.load_cert_chain(certfile, keyfile, password="")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(certfile)
    client.check_hostname = False
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(back, there)
    answering = server.wrap_bio(there, back, server_side=True)
    for side in (asking, answering, asking, answering):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return asking.getpeercert() or {}


def _plain(kind: str, name: str) -> str:
    """Return a name as it is written in a URL: an IPv6 address in its short form."""
    return name if kind == "DNS" else str(ip_address(name.strip()))
