"""The certificate of one's own service: whom nobody else has signed, clients have to be told of."""

import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def own_names(certfile: Path) -> Sequence[str]:
    """Return the names that a self-signed certificate is for; none of one that others signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(OSError):
        context.load_verify_locations(certfile)
    held: Any = context.get_ca_certs()  # as `SSLSocket.getpeercert` describes them
    return [
        name
        for certificate in held
        if certificate["subject"] == certificate["issuer"]
        for kind, name in certificate.get("subjectAltName", ())
        if kind in {"DNS", "IP Address"}
    ]
