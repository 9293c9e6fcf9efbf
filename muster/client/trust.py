"""Whom a client believes that he is the API: by certificates, where it is reached by TLS."""

import ssl
from typing import Final

from muster.client.errors import NoCertificates, Untrusted
from muster.contracts.environ import CA_FILE

LONG_CHAIN: Final = 8
"""Most errors that are looked through for the first of them."""


def trust(url: str, ca_file: str | None) -> ssl.SSLContext:
    """Return what is trusted: `ca_file` (PEM) alone, or what the system trusts.

    Raises `NoCertificates` for a file that holds no certificates.
    """
    if not url.startswith("https:"):
        # Nobody shows a certificate: to read the system's would only take time.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise NoCertificates(
            f"{ca_file} cannot be trusted: {_reason(error)}. Name a file of certificates in PEM in "
            f"{CA_FILE}, or none to trust those of the system"
        ) from error


def untrusted(url: str, error: BaseException) -> Untrusted | None:
    """Return what to say where TLS is why `error` was raised; None where it is not."""
    cause = _cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Untrusted(f"{url} is not proven to be Muster: {_advice(cause)}")
    if isinstance(cause, ssl.SSLError):
        return Untrusted(
            f"what is at {url} does not speak TLS as it should ({_reason(cause)}): if it speaks "
            "none, write http:// in MUSTER_URL"
        )
    return None


def _cause(error: BaseException | None) -> ssl.SSLError | None:
    for _ in range(LONG_CHAIN):
        if error is None or isinstance(error, ssl.SSLError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _advice(error: ssl.SSLCertVerificationError) -> str:
    if "mismatch" in error.verify_message.lower():
        return f"{error.verify_message} Set MUSTER_URL to a name that its certificate is for"
    return (
        f"{error.verify_message}. If the certificate is its operator's own, get it from him as a "
        f"file, and set {CA_FILE} to that"
    )


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).lower().replace("_", " ")
    return error.strerror or str(error)
