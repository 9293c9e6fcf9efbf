"""The built-in program learns what it is there to learn."""

from pathlib import Path

import msgspec
from plain_training import PlainTraining

from muster.classifier import accuracy
from muster.datasets.contents import HELD_OUT_NAME
from muster.datasets.digits import digits
from muster.datasets.index import totals_of
from muster.datasets.listing import find_shards
from muster.datasets.samples import LabelledSample
from muster.datasets.writer import write_dataset
from muster.loading import load


def test_it_learns_the_digits(tmp_path: Path) -> None:
    write_dataset(tmp_path, digits(shards=4, seed=0))
    program = load("muster.programs.classifier:Classifier", tmp_path, dataset_dir=tmp_path)
    training = PlainTraining(program, tmp_path, seed=3, batch_size=64, virtual_shards=8)
    outcome = training.run(epochs=12)
    decoder = msgspec.json.Decoder(LabelledSample)
    held_out = decoder.decode_lines((tmp_path / HELD_OUT_NAME).read_bytes())
    assert accuracy(dict(outcome.state), held_out) >= 0.95
    assert outcome.means[-1].metrics["accuracy"] > 0.9
    assert outcome.means[0].loss > 2.0
    assert outcome.means[-1].loss < 0.3
    assert outcome.read == [totals_of(find_shards(tmp_path))] * 12, "every sample once an epoch"
