import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from muster.datasets.errors import DatasetNotWritable
from muster.datasets.listing import find_shards
from muster.datasets.samples import LabelledSample
from muster.datasets.synthetic import ensure_synthetic, synthetic


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def samples_of(lines: list[bytes]) -> list[LabelledSample]:
    decoder = msgspec.json.Decoder(LabelledSample)
    return [decoder.decode(line) for line in lines]


def test_the_default_data_set_is_the_same_bytes_for_ever(tmp_path: Path) -> None:
    ensure_synthetic(tmp_path / "synthetic")
    shards = find_shards(tmp_path / "synthetic")
    content = b"".join(shard.read_bytes() for shard in shards)
    assert len(shards) == 8
    assert content.count(b"\n") == 2048
    assert (
        hashlib.sha256(content.removesuffix(b"\n")).hexdigest()
        == "5bda71295be1318df28d173166d775ab0ffea624e7a16ed2b22328bcc7a00da9"
    )


def test_the_arguments_shape_the_samples() -> None:
    samples = samples_of(list(synthetic(samples=500, features=3, classes=5, seed=7).lines))
    assert len(samples) == 500
    assert {len(sample.x) for sample in samples} == {3}
    assert {sample.y for sample in samples} == set(range(5))


def test_another_seed_makes_other_samples() -> None:
    assert list(synthetic(seed=1).lines) != list(synthetic(seed=2).lines)


def test_a_nearest_centre_learns_it() -> None:
    samples = samples_of(list(synthetic().lines))
    x = np.array([sample.x for sample in samples])
    y = np.array([sample.y for sample in samples])
    centres = np.stack([x[:1024][y[:1024] == label].mean(axis=0) for label in range(4)])
    distances = ((x[1024:, None, :] - centres) ** 2).sum(axis=2)
    assert (distances.argmin(axis=1) == y[1024:]).mean() > 0.95


def test_lines_are_made_while_they_are_read() -> None:
    lines = iter(synthetic(samples=10**10).lines)
    assert next(lines).startswith(b'{"x":[')


def test_a_complete_data_set_is_left_alone(tmp_path: Path) -> None:
    directory = ensure_synthetic(tmp_path / "deep" / "synthetic")
    before = {path.name: path.stat() for path in directory.iterdir()}
    assert ensure_synthetic(directory) == directory
    assert {path.name: path.stat() for path in directory.iterdir()} == before
    assert names_in(directory.parent) == ["synthetic"]


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    directory = tmp_path / "synthetic"
    directory.mkdir()
    assert len(find_shards(ensure_synthetic(directory))) == 8


def test_a_directory_with_something_else_in_it_is_refused_and_untouched(tmp_path: Path) -> None:
    directory = ensure_synthetic(tmp_path / "synthetic")
    (directory / "shard_00003.txt").unlink()
    before = names_in(directory)
    with pytest.raises(DatasetNotWritable, match="no complete data set: remove it"):
        ensure_synthetic(directory)
    assert names_in(directory) == before
    assert names_in(tmp_path) == ["synthetic"]
