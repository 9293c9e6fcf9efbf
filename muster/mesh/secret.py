"""The secret of a household: made on one machine, typed on the others, never sent."""

import base64
import secrets
import stat
from collections.abc import Mapping
from hashlib import scrypt, sha256
from os import geteuid
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from muster.contracts.errors import MusterError
from muster.host.files import create_private
from muster.links.session import PROTOCOL

KEY_VARIABLE: Final = "MUSTER_CLUSTER_KEY"
NAME_VARIABLE: Final = "MUSTER_CLUSTER_NAME"
DEFAULT_NAME: Final = "home"

RUN: Final = "/run/"
"""Between the name of a household and the group of a `muster run --peers` in it."""

NAME_BYTES: Final = 63

SECRET_BYTES: Final = 16
LEAST_CHARACTERS: Final = 16
"""Of a secret that a person makes up."""

_GROUP: Final = 4  # characters between two dashes


class NoSecret(MusterError):
    """There is no secret on this machine, or one that cannot be used."""


def make_secret() -> str:
    """Return a new secret as people write it: base32 in groups of four."""
    secret = secrets.token_bytes(SECRET_BYTES)
    text = base64.b32encode(secret + _check(secret)).decode().rstrip("=").lower()
    return "-".join(text[at : at + _GROUP] for at in range(0, len(text), _GROUP))


def parse_secret(text: str) -> bytes | None:
    """Return the bytes of a secret that `make_secret` has made; None for any other text."""
    plain = "".join(text.split()).replace("-", "").upper()
    try:
        read = base64.b32decode(plain + "=" * (-len(plain) % 8))
    except ValueError:
        return None
    secret = read[:SECRET_BYTES]
    return secret if read[SECRET_BYTES:] == _check(secret) else None


def _check(secret: bytes) -> bytes:
    """Return a byte by which a mistyped secret is noticed; with it 28 characters are full."""
    return sha256(secret).digest()[:1]


def keep_secret(file: Path, text: str) -> None:
    """Write the secret of this machine. Raises `NoSecret` if it is none, or another is there."""
    if parse_secret(text) is None:
        raise NoSecret(
            "this is not a secret of `muster mesh secret`, or a character is wrong: it has 28 in "
            "groups of four, the letters a to z and the digits 2 to 7"
        )
    try:
        create_private(file, text.strip().encode() + b"\n")
    except FileExistsError:
        if parse_secret(file.read_text()) != parse_secret(text):
            raise NoSecret(
                f"{file} holds another secret: keep that one, which you can read there, or stop "
                "all that runs here, remove the file, and run this command again"
            ) from None


def shared_key(environ: Mapping[str, str], file: Path) -> bytes:
    """Return what the processes of a household share: of secret, cluster's name and protocol.

    Raises `NoSecret`. A process of another name or protocol has another key.
    """
    name = cluster_name(environ)
    if text := environ.get(KEY_VARIABLE, ""):
        secret = parse_secret(text) or _stretched(text, name)
    else:
        secret = _read(file)
    return HKDF(SHA256(), 32, None, f"muster mesh {PROTOCOL} {name}".encode()).derive(secret)


def cluster_name(environ: Mapping[str, str]) -> str:
    """Raises `NoSecret` for a name that cannot be announced."""
    name = environ.get(NAME_VARIABLE, "") or DEFAULT_NAME
    if len(name.encode("utf-8", "replace")) > NAME_BYTES:
        raise NoSecret(f"{NAME_VARIABLE} has more than {NAME_BYTES} bytes: take a shorter name")
    return name


def _stretched(text: str, name: str) -> bytes:
    """Make it slow to try out what a person made up: 63 ms and 32 MB for each attempt."""
    if len(text) < LEAST_CHARACTERS:
        raise NoSecret(f"{KEY_VARIABLE} has fewer than {LEAST_CHARACTERS} characters: take more")
    salt = f"muster mesh {name}".encode()
    return scrypt(text.encode(), salt=salt, n=1 << 15, r=8, p=1, maxmem=64 << 20, dklen=32)


def _read(file: Path) -> bytes:
    try:
        status, text = file.stat(), file.read_text("utf-8")
    except FileNotFoundError:
        raise NoSecret(
            "this machine has no secret: run `muster mesh secret` on one machine of the household, "
            "and `muster mesh join` on the others"
        ) from None
    except (OSError, ValueError) as error:
        raise NoSecret(f"{file} cannot be read: {error}") from error
    if status.st_uid != geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise NoSecret(
            f"{file} can be read by others, or belongs to another user, who may know it. Make a "
            "new secret on all machines, in files of mode 0600 of their own users"
        )
    if (secret := parse_secret(text)) is None:
        raise NoSecret(f"{file} is not whole: remove it, and run `muster mesh join`")
    return secret
