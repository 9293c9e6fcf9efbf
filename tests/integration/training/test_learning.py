"""The built-in program learns what it is there to learn."""

from pathlib import Path

import msgspec

from muster.datasets.random_access import RandomAccess
from muster.datasets.schema import LabelledSample
from muster.datasets.source import HELD_OUT_NAME
from muster.datasets.sources import open_source
from muster.datasets.synthetic import digits
from muster.datasets.writer import write_dataset
from muster.training.classifier import accuracy
from muster.training.loader import load_program
from tests.support.plain_training import PlainTraining


def test_it_learns_the_digits(tmp_path: Path) -> None:
    write_dataset(tmp_path, digits(shards=4, seed=0))
    program = load_program("muster.training.classifier:Classifier", tmp_path, dataset_dir=tmp_path)
    training = PlainTraining(program, tmp_path, seed=3, batch_size=64, virtual_shards=8)
    outcome = training.run(epochs=12)
    decoder = msgspec.json.Decoder(LabelledSample)
    held_out = decoder.decode_lines((tmp_path / HELD_OUT_NAME).read_bytes())
    assert accuracy(dict(outcome.state), held_out) >= 0.95
    assert outcome.means[-1].metrics["accuracy"] > 0.9
    assert outcome.means[0].loss > 2.0
    assert outcome.means[-1].loss < 0.3
    assert outcome.read == [RandomAccess(open_source(tmp_path)).totals] * 12, (
        "every sample once an epoch"
    )
