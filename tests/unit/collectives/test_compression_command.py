"""What a file of gradients costs and keeps in each kind."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from muster.collectives.compression.__main__ import TRIED, main, measure
from muster.collectives.compression.kinds import Compression

SHAPE = (300, 200)


@pytest.fixture
def gradients(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    weights, bias = draw.standard_normal(SHAPE, np.float32), draw.standard_normal(200, np.float32)
    save_file({"bias": bias, "step": np.array([3]), "weights": weights}, tmp_path / "g.safetensors")
    return tmp_path / "g.safetensors"


def test_each_kind_has_a_line(gradients: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(gradients)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(TRIED)
    main([str(gradients), '{"kind": "top_k", "ratio": 0.5}'])
    assert capsys.readouterr().out.splitlines()[1].endswith('{"kind": "top_k", "ratio": 0.5}')


@pytest.mark.parametrize(
    ("compression", "ratio", "error"),
    [("float32", 1, 0), ("bf16", 0.5, 0.002), ("int8", 0.253, 0.01), ("sign", 0.0323, 0.61)],
)
def test_figures_are_those_of_the_kind(
    compression: Compression, ratio: float, error: float
) -> None:
    array = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    size_bytes, found, *_, lost, cosine = measure(compression, [array])
    assert size_bytes / array.nbytes == found == pytest.approx(ratio, abs=0.002)
    assert lost == pytest.approx(error, abs=0.01)
    assert cosine == pytest.approx(np.sqrt(1 - lost**2), abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "python -m muster.collectives.compression FILE"),
        (["none.safetensors"], "none.safetensors cannot be measured: No such file"),
        (["{gradients}", "int4"], "no compression 'int4'"),
        (["{gradients}", '{"kind"'], "cannot be measured: Expecting ':'"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: list[str], words: str, gradients: Path) -> None:
    with pytest.raises(SystemExit, match=words):
        main([it.replace("{gradients}", str(gradients)) for it in arguments])
