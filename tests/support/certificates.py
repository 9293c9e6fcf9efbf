"""Self-signed certificates, made by the openssl command."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the command openssl to make a certificate"
)


def own_certificate(directory: Path, names: str = "IP:127.0.0.1", *extensions: str) -> Path:
    """Return the file of a new one for these names, as openssl writes them; `key_of` it is beside.

    ``DNS:train.example,IP:127.0.0.1``, for example; more `extensions` as ``keyUsage=…``. It holds
    for two days.
    """
    certificate = directory / "certificate.pem"
    words = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        f" -keyout {key_of(certificate)} -out {certificate} -subj /CN=muster"
        f" -addext subjectAltName={names}"
    )
    more = [word for extension in extensions for word in ("-addext", extension)]
    subprocess.run([*words.split(), *more], capture_output=True, check=True)
    return certificate


def key_of(certificate: Path) -> Path:
    """Return the file of the private key."""
    return certificate.with_name("key.pem")
