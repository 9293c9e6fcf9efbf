import msgspec
import pytest
from xxhash import xxh3_64_hexdigest

from muster.checkpoints.errors import CheckpointDamaged
from muster.checkpoints.manifest import (
    CheckpointName,
    FileFacts,
    Manifest,
    decode_manifest,
    generation_of_temporary,
    latest_line,
    parse_latest,
    sign,
    temporary_latest,
)
from muster.contracts.shards import Position
from tests.support.checkpoint_ranks import flipped

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
    """Return a correctly signed manifest with other fields."""
    fields = {**msgspec.to_builtins(MANIFEST), **changes}
    fields["manifest_xxh3"] = fields.pop("manifest_xxh3")
    unsigned = msgspec.json.encode(fields)
    return unsigned[:-2] + xxh3_64_hexdigest(unsigned).encode() + b'"}'


def test_manifest_round_trips() -> None:
    manifest, content = sign(MANIFEST)
    assert decode_manifest(content, "m") == manifest
    assert msgspec.structs.replace(manifest, manifest_xxh3="") == MANIFEST
    assert msgspec.json.decode(content)["position"]["step"] == 42


def test_every_flipped_bit_and_truncation_is_detected() -> None:
    _, content = sign(MANIFEST)
    flips = [flipped(content, index, bit) for index in range(len(content)) for bit in range(8)]
    for damaged in [*flips, *(content[:length] for length in range(len(content)))]:
        with pytest.raises(CheckpointDamaged):
            decode_manifest(damaged, "m")


STRANGE = {
    "an unknown field": {"extra": 1},
    "another format": {"format": 2},
    "a field of another type": {"step": "42"},
    "a file outside": {"files": {"../../secret": {"size_bytes": 1, "xxh3": "0" * 16}}},
    "a position with more in it": {"position": {"step": 1, "extra": 2}},
}


@pytest.mark.parametrize("changes", STRANGE.values(), ids=list(STRANGE))
def test_signed_but_invalid_manifest_is_refused(changes: dict[str, object]) -> None:
    assert decode_manifest(signed_anew(), "m").step == 42
    with pytest.raises(CheckpointDamaged):
        decode_manifest(signed_anew(**changes), "m")


def test_deeply_nested_manifest_is_refused() -> None:
    unsigned = b'{"values":' + b"[" * 100_000 + b',"manifest_xxh3":""}'
    content = unsigned[:-2] + xxh3_64_hexdigest(unsigned).encode() + b'"}'
    with pytest.raises(CheckpointDamaged):
        decode_manifest(content, "m")


NAMES = {
    "step_0000000042.g0003": CheckpointName(3, 42),
    "step_0000000042.g0003.r0001": CheckpointName(3, 42, 1),
    "step_0000000000.g0000": CheckpointName(0, 0),
    "step_12345678901.g12345": CheckpointName(12345, 12345678901),
}

NO_NAMES = [
    "",
    "step_42.g3",
    "step_0000000042",
    "step_0000000042.g0003 ",
    "step_0000000042.g0003\n",
    "step_0000000042.g0003.r0000",
    "step_00000000042.g0003",
    "step_-000000042.g0003",
    "step_000000004\u0662.g0003",
    "../step_0000000042.g0003",
    "step_0000000042.g0003/..",
    ".step_0000000042.g0003.tmp",
]


@pytest.mark.parametrize(("text", "name"), NAMES.items())
def test_checkpoint_name_round_trips(text: str, name: CheckpointName) -> None:
    assert str(name) == text
    assert CheckpointName.parse(text) == name
    assert parse_latest(latest_line(name)) == name


@pytest.mark.parametrize("text", NO_NAMES)
def test_invalid_checkpoint_name_is_none(text: str) -> None:
    assert CheckpointName.parse(text) is None


def test_names_sort_by_generation_then_step_then_revision() -> None:
    ordered = [CheckpointName(*each) for each in ((0, 9), (1, 1), (1, 2), (1, 2, 1), (2, 0))]
    assert sorted({*ordered}) == ordered


def test_temporary_names_hold_the_generation() -> None:
    assert generation_of_temporary(CheckpointName(7, 1).temporary()) == 7
    assert generation_of_temporary(CheckpointName(7, 1, 2).temporary("0123456789abcdef")) == 7
    assert generation_of_temporary(temporary_latest(12)) == 12
    assert generation_of_temporary(temporary_latest(12, "0123456789abcdef")) == 12
    for other in ("LATEST", ".LATEST.tmp", "step_0000000001.g0007.tmp", ".x.g0001.tmp"):
        assert generation_of_temporary(other) is None
