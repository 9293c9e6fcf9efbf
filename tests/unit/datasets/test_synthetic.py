import hashlib
import sys
from pathlib import Path

import msgspec
import pytest

from muster.datasets.errors import DatasetError, DatasetNotWritable
from muster.datasets.schema import LabelledSample
from muster.datasets.sources import open_source
from muster.datasets.synthetic import digits, ensure_synthetic, synthetic
from tests.support.ranks import shard_paths


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def samples_of(lines: list[bytes]) -> list[LabelledSample]:
    decoder = msgspec.json.Decoder(LabelledSample)
    return [decoder.decode(line) for line in lines]


def test_default_data_set_never_changes(tmp_path: Path) -> None:
    ensure_synthetic(tmp_path / "synthetic")
    shards = shard_paths(tmp_path / "synthetic")
    content = b"".join(shard.read_bytes() for shard in shards)
    assert len(shards) == 8
    assert content.count(b"\n") == 2048
    assert (
        hashlib.sha256(content.removesuffix(b"\n")).hexdigest()
        == "5bda71295be1318df28d173166d775ab0ffea624e7a16ed2b22328bcc7a00da9"
    )


def test_arguments_set_the_schema() -> None:
    samples = samples_of(list(synthetic(samples=500, features=3, classes=5, seed=7).lines))
    assert len(samples) == 500
    assert {len(sample.x) for sample in samples} == {3}
    assert {sample.y for sample in samples} == set(range(5))


def test_lines_are_generated_lazily() -> None:
    lines = iter(synthetic(samples=10**10).lines)
    assert next(lines).startswith(b'{"x":[')


def test_complete_data_set_is_kept(tmp_path: Path) -> None:
    (tmp_path / "deep" / "synthetic").mkdir(parents=True)
    directory = ensure_synthetic(tmp_path / "deep" / "synthetic")
    assert len(open_source(directory).shards) == 8
    before = {path.name: path.stat() for path in directory.iterdir()}
    assert ensure_synthetic(directory) == directory
    assert {path.name: path.stat() for path in directory.iterdir()} == before
    assert names_in(directory.parent) == ["synthetic"]


def test_other_content_is_refused_and_untouched(tmp_path: Path) -> None:
    directory = ensure_synthetic(tmp_path / "synthetic")
    (directory / "shard_00003.txt").unlink()
    before = names_in(directory)
    with pytest.raises(DatasetNotWritable, match="not a complete data set: remove it"):
        ensure_synthetic(directory)
    assert names_in(directory) == before
    assert names_in(tmp_path) == ["synthetic"]


pytestmark = pytest.mark.slow


def sha256(lines: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


@pytest.mark.slow
def test_digits_of_a_seed_never_change() -> None:
    facts, lines, held_out = digits(shards=8, seed=0)
    assert (facts.samples, facts.held_out, facts.shards) == (1438, 359, 8)
    assert sha256(list(lines)) == "40ddd5c470a1918bd32957ceac4f8eddb376c9239f52c18dcd631f07bdd99641"
    assert (
        sha256(list(held_out)) == "4308a8bdd48c65856771512cda86f7ef5523f35ef45b1fbd947fd5cd41964ce6"
    )


@pytest.mark.slow
def test_seed_selects_the_held_out_digits() -> None:
    one, other = digits(shards=8, seed=1), digits(shards=8, seed=2)
    assert list(one.held_out) != list(other.held_out)
    assert sorted([*one.lines, *one.held_out]) == sorted([*other.lines, *other.held_out])


def test_missing_scikit_learn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DatasetError, match=r"pip install .*\[digits\]'"):
        digits(shards=8, seed=0)
