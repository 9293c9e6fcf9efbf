import subprocess
import sys
from pathlib import Path

import pytest

from muster.datasets.errors import InvalidSample
from muster.datasets.index import Line
from muster.training.batches import decode_lines, decoder_of

SHARD = Path("data/shard_00000.txt")


class WithoutDecode:
    """As much of a program as these tests look at."""


class WithDecode:
    def decode(self, line: bytes) -> float:
        return float(line)


def lines(*contents: bytes) -> list[Line]:
    return [Line(content, SHARD, number) for number, content in enumerate(contents, start=7)]


def test_line_is_json_unless_the_program_decodes_it() -> None:
    assert decode_lines(lines(b'{"x":[1]}', b"2"), decoder_of(WithoutDecode())) == [{"x": [1]}, 2]
    assert decode_lines(lines(b"0.5", b"2"), decoder_of(WithDecode())) == [0.5, 2.0]


@pytest.mark.parametrize(
    ("program", "problem"),
    [(WithoutDecode(), "malformed"), (WithDecode(), "ValueError: could not convert")],
)
def test_undecodable_line_is_named(program: object, problem: str) -> None:
    with pytest.raises(InvalidSample, match=problem) as caught:
        decode_lines(lines(b"1", b"one"), decoder_of(program))
    assert str(caught.value).startswith(f"{SHARD}:8: no sample, ")
    assert caught.value.__cause__ is not None, "the program's own traceback is kept"


def test_example_in_the_docstring_trains(tmp_path: Path) -> None:
    import muster.program  # noqa: PLC0415  its docstring, and nothing else

    text = muster.program.__doc__ or ""
    example = text[text.index("    class") : text.index("The runtime")]
    file = tmp_path / "example.py"
    lesson = """
batch = Batch([{"x": [1] * 8, "y": 1}, {"x": [2] * 8, "y": 1}], np.array([1, 0], np.float32))
program = Regression()
state = program.initial(0)
for step in range(9):
    contribution = program.gradient(state, batch, None)
    state = program.update(state, contribution.gradients, step)
assert 0 < program.gradient(state, batch, None).loss < 0.001
"""
    imports = "import numpy as np\nfrom muster.program import Batch, Contribution\nif True:\n"
    file.write_text(imports + example + lesson)
    subprocess.run([sys.executable, file], check=True, timeout=60)


def test_numpy_is_not_imported_for_a_name() -> None:
    code = "import sys, muster.program; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
