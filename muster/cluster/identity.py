"""Which node this is: an id, derived from a key pair that is made at the first start.

Rows name a node by its id. A word such as `local` would mean another machine once a coordinator
there takes over, and start what it names twice.

The key is Ed25519 in the format of OpenSSH, which holds the public half in the clear: a process
that needs only the id does without `cryptography`.
"""

import base64
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from muster.host.private import UnusableDirectory

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
        raise UnusableDirectory.because_of(file, error) from error
    public = b""
    with suppress(ValueError):
        _, *lines, last = content.splitlines()
        public = base64.b64decode(b"".join(lines)).partition(_KIND)[2][:_KEY_BYTES]
    if len(public) < _KEY_BYTES or last != _LAST_LINE:
        raise UnusableDirectory(
            f"{file} is not the key of a node: restore it from a backup, or remove it, after which "
            "this is a new node, and ranks that were here are on one that does not answer"
        )
    return f"n-{sha256(public).hexdigest()[:12]}"


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
    # The file is of mode 0600.
    with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.") as made:
        made.write(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        made.flush()
        os.fsync(made.fileno())
        with suppress(FileExistsError):  # a link, unlike a rename, replaces nothing
            os.link(made.name, file)
