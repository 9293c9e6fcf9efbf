"""The files of TLS: whether a service could use them, and which is taken for the other."""

import shlex
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Final

from muster.contracts.errors import MusterError

LOOKED_AT_BYTES: Final = 1 << 20
"""A certificate with its chain, and its key, are a few thousand."""

_KEY: Final = b"PRIVATE KEY-----"
_CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"


class InvalidCertificate(MusterError):
    """The files of MUSTER_TLS_CERTFILE and MUSTER_TLS_KEYFILE cannot be used."""

    def __init__(self, certfile: Path, keyfile: Path | None, error: OSError) -> None:
        self.seen, self.fix = _mixed_up(certfile, keyfile) or _unreadable(certfile, keyfile, error)
        super().__init__(f"{self.seen}: {self.fix}")


def check_certificate(certfile: Path, keyfile: Path | None) -> None:
    """Raise `InvalidCertificate` unless a server could use these files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a password would else ask for it at the terminal.
        context.load_cert_chain(certfile, keyfile, password="")
    except OSError as error:
        raise InvalidCertificate(certfile, keyfile, error) from error


def holds_key(file: Path) -> bool:
    """Whether there is a private key in a file, as far as its lines say; raises `OSError`."""
    return _KEY in _text(file)


def _holds_certificate(file: Path) -> bool:
    return _CERTIFICATE in _text(file)


def _text(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(LOOKED_AT_BYTES)


def _mixed_up(certfile: Path, keyfile: Path | None) -> tuple[str, str] | None:
    """Return what is wrong and what to do, if a file holds what the other one is to hold."""
    if keyfile is None:
        return None
    with suppress(OSError):  # what cannot be read is another fault
        is_key = holds_key(certfile) and not _holds_certificate(certfile)
        is_certificate = _holds_certificate(keyfile) and not holds_key(keyfile)
        if is_key and is_certificate:
            certificate, key = shlex.quote(str(keyfile)), shlex.quote(str(certfile))
            seen = f"{certfile} holds a key and {keyfile} a certificate: they look swapped"
            return seen, f"export MUSTER_TLS_CERTFILE={certificate} MUSTER_TLS_KEYFILE={key}"
        if is_key:
            wanted = "MUSTER_TLS_CERTFILE is to name the file of the certificate"
            return f"{certfile} holds a key and no certificate", wanted
        if is_certificate:
            wanted = "MUSTER_TLS_KEYFILE is to name the file of the key"
            return f"{keyfile} holds a certificate and no key", wanted
    return None


def _unreadable(certfile: Path, keyfile: Path | None, error: OSError) -> tuple[str, str]:
    files = f"{certfile} and {keyfile}" if keyfile else f"{certfile}"
    unset = "" if keyfile else "; it is not set, so the first file was to hold the key as well"
    seen = f"no certificate and key can be read from {files} ({error.strerror or error})"
    fix = (
        "MUSTER_TLS_CERTFILE is to name a PEM file with the certificate and its chain, "
        f"MUSTER_TLS_KEYFILE one with its key, without a password{unset}"
    )
    return seen, fix
