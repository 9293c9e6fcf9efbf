"""Which node this is: an id, derived from a key pair that is made at the first start.

Rows name a node by its id. A word such as `local` would mean another machine once a coordinator
there takes over, and start what it names twice.

The key is Ed25519 in the format of OpenSSH, which holds the public half in the clear: a process
that needs only the id does without `cryptography`.
"""

import base64
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from muster.host.files import create_private
from muster.host.private import UnusableDirectory

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_LAST_LINE: Final = b"-----END OPENSSH PRIVATE KEY-----"
_KEY_BYTES: Final = 32
_KIND: Final = b"ssh-ed25519" + _KEY_BYTES.to_bytes(4)  # stands before the public key


def node_id(file: Path) -> str:
    """Return the id of the node whose key is in `file`, which is made if it is missing.

    Raises `UnusableDirectory` if it cannot be made or read.
    """
    try:
        if not file.exists():
            _make_key(file)
        content = file.read_bytes()
    except OSError as error:
        raise UnusableDirectory.because_of(file.parent, error) from error
    public = b""
    with suppress(ValueError):
        _, *lines, last = content.splitlines()
        public = base64.b64decode(b"".join(lines)).partition(_KIND)[2][:_KEY_BYTES]
    if len(public) < _KEY_BYTES or last != _LAST_LINE:
        raise UnusableDirectory(
            f"{file} is not the key of a node: restore it from a backup, or remove it, after which "
            "this is a new node, and ranks that were here are on one that does not answer"
        )
    return id_of(public)


def id_of(public_key: bytes) -> str:
    """Return the id of the node with this key."""
    return f"n-{sha256(public_key).hexdigest()[:12]}"


def node_key(file: Path) -> "Ed25519PrivateKey":
    """Return the key in `file`, which is made if it is missing. Raises `UnusableDirectory`."""
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415  see the docstring
        load_ssh_private_key,
    )

    node_id(file)
    try:
        return load_ssh_private_key(file.read_bytes(), None)  # type: ignore[return-value]
    except OSError as error:
        raise UnusableDirectory.because_of(file.parent, error) from error


def _make_key(file: Path) -> None:
    """Make a key, unless another process does so first. Raises OSError."""
    # Imported here: only the first start on a machine needs it.
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
        Ed25519PrivateKey,
    )
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = Ed25519PrivateKey.generate()
    with suppress(FileExistsError):
        create_private(file, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
