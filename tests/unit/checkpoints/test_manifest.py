import msgspec
import pytest
from vaults import flipped
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.durable import FileFacts
from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.manifest import Manifest, decode, sign
from muster.contracts.position import Position

MANIFEST = Manifest(
    step=42,
    time="2026-01-02T12:00:00.000Z",
    rank=1,
    world_size=4,
    job_id="job",
    job_uid=None,
    generation=3,
    position=Position(step=42, consumed_hash=2**64 - 1),
    values={"rng": 2**127 + 1, "note": 'a "manifest_xxh3":"0123456789abcdef"}'},
    files={"state.safetensors": FileFacts(5, "0" * 16)},
)


def signed_anew(**changes: object) -> bytes:
    """Return what a hostile or future writer would write: another manifest, rightly signed."""
    fields = {**msgspec.to_builtins(MANIFEST), **changes}
    fields["manifest_xxh3"] = fields.pop("manifest_xxh3")
    unsigned = msgspec.json.encode(fields)
    return unsigned[:-2] + xxh3_64_hexdigest(unsigned).encode() + b'"}'


def test_a_manifest_is_read_as_it_was_signed() -> None:
    manifest, content = sign(MANIFEST)
    assert decode(content, "m") == manifest
    assert msgspec.structs.replace(manifest, manifest_xxh3="") == MANIFEST
    assert msgspec.json.decode(content)["position"]["step"] == 42


def test_every_flipped_bit_is_seen() -> None:
    _, content = sign(MANIFEST)
    for index in range(len(content)):
        for bit in range(8):
            with pytest.raises(CheckpointDamaged):
                decode(flipped(content, index, bit), "m")


def test_every_cut_is_seen() -> None:
    _, content = sign(MANIFEST)
    for length in range(len(content)):
        with pytest.raises(CheckpointDamaged):
            decode(content[:length], "m")


STRANGE = {
    "a field nobody knows": {"extra": 1},
    "another format": {"format": 2},
    "a field of another type": {"step": "42"},
    "a file outside": {"files": {"../../secret": {"size_bytes": 1, "xxh3": "0" * 16}}},
    "a position with more in it": {"position": {"step": 1, "extra": 2}},
}


@pytest.mark.parametrize("changes", STRANGE.values(), ids=list(STRANGE))
def test_a_right_signature_does_not_make_a_manifest(changes: dict[str, object]) -> None:
    assert decode(signed_anew(), "m").step == 42
    with pytest.raises(CheckpointDamaged):
        decode(signed_anew(**changes), "m")


def test_a_manifest_nested_too_deeply_is_refused() -> None:
    unsigned = b'{"values":' + b"[" * 100_000 + b',"manifest_xxh3":""}'
    content = unsigned[:-2] + xxh3_64_hexdigest(unsigned).encode() + b'"}'
    with pytest.raises(CheckpointDamaged):
        decode(content, "m")
