"""Loading the program that a job names; every mistake is one sentence with its place."""

import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.datasets.errors import DatasetMissing
from muster.program import InvalidProgram, Program, refuse_while_loaded
from muster.training.loader import load_program

FUNCTIONS = """
    def initial(self, seed): return {"seed": seed}
    def gradient(self, state, batch, random): ...
    def update(self, state, gradients, step): ...
"""
PROGRAM = f"class Model:{FUNCTIONS}"
DATA = Path("the data")


@pytest.fixture(autouse=True)
def imports_as_before() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def written(directory: Path, text: str = PROGRAM, name: str = "train.py") -> Path:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return directory


def load(reference: str, directory: Path) -> Program:
    return load_program(reference, directory, dataset_dir=DATA)


def refused(reference: str, directory: Path) -> str:
    with pytest.raises(InvalidProgram) as caught:
        load(reference, directory)
    return str(caught.value)


@pytest.mark.parametrize(
    "reference", ["train.py:Model", "./train.py:Model", "train:Model", "train:make", "train:model"]
)
def test_file_or_module_names_class_function_or_object(tmp_path: Path, reference: str) -> None:
    written(tmp_path, f"{PROGRAM}\ndef make(): return Model()\nmodel = Model()\n")
    assert load(reference, tmp_path).initial(7) == {"seed": 7}


@pytest.mark.parametrize(
    ("reference", "module"),
    [("models.deep:Model", "models.size"), ("models/deep.py:Model", "size")],
)
def test_program_can_import_its_neighbours(tmp_path: Path, reference: str, module: str) -> None:
    written(tmp_path, "", "models/__init__.py")
    written(tmp_path, f"from {module} import SIZE\n{PROGRAM}", "models/deep.py")
    written(tmp_path, "SIZE = 3", "models/size.py")
    assert load(reference, tmp_path).initial(1) == {"seed": 1}


@pytest.mark.parametrize("name", ["numpy.py", "worker.py", "muster.py", "json.py"])
def test_file_with_the_name_of_a_module_replaces_nothing(tmp_path: Path, name: str) -> None:
    before = {key: sys.modules.get(key) for key in ("numpy", "worker", "muster", "json")}
    load(f"{name}:Model", written(tmp_path, name=name))
    assert {key: sys.modules.get(key) for key in before} == before


def test_dataclass_can_be_a_program(tmp_path: Path) -> None:
    head = "from dataclasses import dataclass\n@dataclass\nclass Model:\n    size: int = 3\n"
    assert vars(load("train.py:Model", written(tmp_path, head + FUNCTIONS))) == {"size": 3}


@pytest.mark.parametrize(
    ("init", "given"),
    [
        ("self", None),
        ("self, directory", DATA),
        ("self, directory=None", None),
        ("self, directory, size=3", DATA),
        ("self, *words, **names", None),
    ],
)
def test_program_gets_the_data_directory_if_it_takes_one(
    tmp_path: Path, init: str, given: Path | None
) -> None:
    body = "self.given = directory" if "directory" in init else "self.given = None"
    text = f"class Model:\n    def __init__({init}): {body}\n{FUNCTIONS}"
    assert vars(load("train.py:Model", written(tmp_path, text))) == {"given": given}


@pytest.mark.parametrize(
    ("reference", "text", "sentence"),
    [
        *((each, PROGRAM, "such as train.py:Model") for each in ("train.py", ":Model", "train:")),
        ("gone.py:Model", PROGRAM, "gone.py does not exist"),
        ("gone_for_good:Model", PROGRAM, "No module named 'gone_for_good'"),
        ("train.py:Modle", PROGRAM, "train.py defines no 'Modle': it has Model"),
        ("train.py:Modle", "", "it has no class"),
        ("train.py:Model", "Model = 3", "not a program: name a class that has initial, gradient"),
        ("train.py:Model", "import json as Model", "not a program: name a class"),
        (
            "train.py:Model",
            f"class Model:\n    def __init__(self, data, size): ...\n{FUNCTIONS}",
            "needs the arguments data and size",
        ),
        (
            "train.py:Model",
            "class Model:\n    def initial(self, seed): ...\n    update = 3",
            "has no gradient and update: it needs initial, gradient and update",
        ),
        (
            "train.py:Model",
            PROGRAM.replace("batch, random", "batch"),
            "cannot be called as gradient(state, batch, random): too many",
        ),
    ],
)
def test_what_is_no_program_is_refused(
    tmp_path: Path, reference: str, text: str, sentence: str
) -> None:
    assert sentence in refused(reference, written(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import numpy\n\nimport numpyy\n", ":3, ModuleNotFoundError: No module named 'numpyy'"),
        ("x = 1\nclass Model\n", ":2, SyntaxError: expected ':'"),
        ("def f():\n    raise KeyError(5)\nf()\n", ":2, KeyError: 5"),
        ("import json\njson.loads('{')\n", ":2, JSONDecodeError: Expecting property name"),
        ("import sys\nsys.exit(3)\n", ":2, SystemExit: 3"),
        (
            f"class Model:\n    def __init__(self):\n        raise OSError('full')\n{FUNCTIONS}",
            ":3, OSError: full",
        ),
    ],
)
@pytest.mark.parametrize("reference", ["train.py:Model", "train:Model"])
def test_error_of_the_program_names_its_line(
    tmp_path: Path, text: str, problem: str, reference: str
) -> None:
    assert f"{tmp_path / 'train.py'}{problem}" in refused(reference, written(tmp_path, text))


def test_failed_import_keeps_the_traceback_and_no_module(tmp_path: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(InvalidProgram) as caught:
        load("train.py:Model", written(tmp_path, "def f():\n    1 / 0\nf()\n"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "1 / 0" in "".join(traceback.format_exception(caught.value.__cause__))
    assert set(sys.modules) == before


def test_errors_of_muster_pass_through(tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing, match="the data set the data does not exist"):
        load("muster.training.classifier:Classifier", tmp_path)


@pytest.mark.parametrize("name", ["Nope", "Model", "train"])
@pytest.mark.parametrize("place", ["train.py", "train"], ids=["file", "module"])
def test_script_is_refused_before_it_joins(tmp_path: Path, place: str, name: str) -> None:
    text = f"import muster\ndef train(): muster.join()\n{PROGRAM}"
    script = text if name == "train" else f"{text}\ntrain()\nraise AssertionError(1)\n"
    sentence = refused(f"{place}:{name}", written(tmp_path, script))
    assert sentence.startswith(f"'{place}:{name}' is a script, not a program: it calls muster.join")
    refuse_while_loaded()  # the refusal is over: a script may join again


def test_script_may_join_after_a_program_is_loaded(tmp_path: Path) -> None:
    load("train.py:Model", written(tmp_path))
    refuse_while_loaded()


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
