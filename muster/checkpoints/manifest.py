"""What a checkpoint says about itself.

JSON with a hash of itself: the last field is the xxh3 of the very bytes of the file with that
field empty, so that any flipped bit is seen, whether or not it would still parse.
"""

import re
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.durable import FileFacts
from muster.checkpoints.errors import CheckpointDamaged, UnsupportedState
from muster.checkpoints.names import STATE, CheckpointName
from muster.contracts.position import Position

FORMAT: Final = 1

MANIFEST_LIMIT_BYTES: Final = 16 << 20
"""Values are for counters, names and random states; what is larger belongs into an array."""

_SIGNED: Final = re.compile(rb'"manifest_xxh3":"([0-9a-f]{16})"}\Z')


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about one checkpoint but the bytes of its arrays."""

    format: int = FORMAT
    step: int
    time: str
    """When the save began: RFC 3339, UTC."""
    rank: int
    world_size: int
    job_id: str
    job_uid: str | None
    """None when the program was started by hand."""
    generation: int
    position: Position
    values: dict[str, Any]
    """The state's values, as `muster.checkpoints.values` writes them."""
    files: dict[str, FileFacts]
    manifest_xxh3: str = ""

    def is_named(self, name: CheckpointName) -> bool:
        """Return whether this may be the manifest in the directory `name`."""
        return (self.generation, self.step) == (name.generation, name.step)


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Manifest)


def sign(manifest: Manifest) -> tuple[Manifest, bytes]:
    """Return the manifest with its hash in it, and its bytes; raises `UnsupportedState`."""
    try:
        unsigned = _ENCODER.encode(manifest)
    except (ValueError, RecursionError) as error:
        raise UnsupportedState(
            f"the values of the state cannot be written as JSON: {error}"
        ) from error
    if len(unsigned) > MANIFEST_LIMIT_BYTES:
        raise UnsupportedState(
            f"the values of the state take {len(unsigned)} bytes as JSON, and the limit is "
            f"{MANIFEST_LIMIT_BYTES}: put large data into numpy arrays"
        )
    signature = xxh3_64_hexdigest(unsigned)
    signed = msgspec.structs.replace(manifest, manifest_xxh3=signature)
    return signed, b'%s%s"}' % (unsigned[:-2], signature.encode())


def decode(content: bytes | bytearray, where: str) -> Manifest:
    """Return the manifest whose bytes these are, verified; raises `CheckpointDamaged`."""
    signature = _SIGNED.search(content, max(0, len(content) - 64))
    if signature is None:
        raise CheckpointDamaged(f"{where} is cut short, or is no manifest")
    start, end = signature.span(1)
    if xxh3_64_hexdigest(content[:start] + content[end:]).encode() != signature[1]:
        raise CheckpointDamaged(f"{where} does not have the hash it says it has")
    try:
        manifest = _DECODER.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is no manifest of this version: {error}") from error
    if manifest.format != FORMAT:
        raise CheckpointDamaged(
            f"{where} has format {manifest.format}, and this version reads {FORMAT}"
        )
    if not manifest.files.keys() <= {STATE}:
        raise CheckpointDamaged(f"{where} lists files that no checkpoint has")
    return manifest
