import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.datasets.errors import DatasetMissing
from muster.program import InvalidProgram, refuse_while_loaded
from muster.training.loader import load_program

PROGRAM = """
class Model:
    def initial(self, seed): return {"seed": seed}
    def gradient(self, state, batch, random): ...
    def update(self, state, gradients, step): ...
"""
FUNCTIONS = PROGRAM.split("\n", 2)[2]
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


def refused(reference: str, directory: Path) -> str:
    with pytest.raises(InvalidProgram) as caught:
        load_program(reference, directory, dataset_dir=DATA)
    return str(caught.value)


@pytest.mark.parametrize("reference", ["train.py:Model", "./train.py:Model", "train:Model"])
def test_a_program_is_loaded_from_a_file_or_a_module(tmp_path: Path, reference: str) -> None:
    program = load_program(reference, written(tmp_path), dataset_dir=DATA)
    assert program.initial(7) == {"seed": 7}


def test_a_module_in_a_package_is_found_from_the_working_directory_on(tmp_path: Path) -> None:
    written(tmp_path, "", "models/__init__.py")
    written(tmp_path, "from models.size import SIZE\n" + PROGRAM, "models/deep.py")
    written(tmp_path, "SIZE = 3", "models/size.py")
    assert load_program("models.deep:Model", tmp_path, dataset_dir=DATA).initial(1) == {"seed": 1}


def test_a_file_finds_its_neighbours_as_a_script_does(tmp_path: Path) -> None:
    written(tmp_path, "from neighbour import SIZE\n" + PROGRAM, "code/train.py")
    written(tmp_path, "SIZE = 3", "code/neighbour.py")
    assert load_program("code/train.py:Model", tmp_path, dataset_dir=DATA).initial(1) == {"seed": 1}


@pytest.mark.parametrize("name", ["numpy.py", "worker.py", "muster.py", "json.py"])
def test_a_file_that_is_called_as_something_else_replaces_nothing(
    tmp_path: Path, name: str
) -> None:
    before = {key: sys.modules.get(key) for key in ("numpy", "worker", "muster", "json")}
    load_program(f"{name}:Model", written(tmp_path, name=name), dataset_dir=DATA)
    assert {key: sys.modules.get(key) for key in before} == before


def test_a_dataclass_can_be_a_program(tmp_path: Path) -> None:
    head = "from dataclasses import dataclass\n@dataclass\nclass Model:\n    size: int = 3\n"
    text = head + FUNCTIONS
    assert vars(load_program("train.py:Model", written(tmp_path, text), dataset_dir=DATA)) == {
        "size": 3
    }


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
def test_it_is_given_the_directory_of_the_data_if_it_asks_for_something(
    tmp_path: Path, init: str, given: Path | None
) -> None:
    body = "self.given = directory" if "directory" in init else "self.given = None"
    text = f"class Model:\n    def __init__({init}): {body}\n{FUNCTIONS}"
    program = load_program("train.py:Model", written(tmp_path, text), dataset_dir=DATA)
    assert vars(program) == {"given": given}


@pytest.mark.parametrize("name", ["make", "model"])
def test_a_function_is_called_and_an_object_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    text = PROGRAM + "def make(): return Model()\nmodel = Model()\n"
    assert load_program(f"train.py:{name}", written(tmp_path, text), dataset_dir=DATA).initial(1)


@pytest.mark.parametrize("reference", ["train.py", "Model", "train.py:", ":Model", ""])
def test_a_reference_without_a_file_or_a_name_is_refused(tmp_path: Path, reference: str) -> None:
    assert "such as train.py:Model" in refused(reference, written(tmp_path))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path / 'gone.py'} does not exist" in refused("gone.py:Model", tmp_path)


def test_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "No module named 'gone_for_good'" in refused("gone_for_good:Model", tmp_path)


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("import numpy\n\nimport numpyy\n", ":3", "ModuleNotFoundError: No module named 'numpyy'"),
        ("x = 1\nclass Model\n", ":2", "SyntaxError: expected ':'"),
        ("def f():\n    raise KeyError(5)\nf()\n", ":2", "KeyError: 5"),
        ("import json\njson.loads('{')\n", ":2", "JSONDecodeError: Expecting property name"),
        ("import sys\nsys.exit(3)\n", ":2", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("reference", ["train.py:Model", "train:Model"])
def test_an_error_while_it_is_imported_is_told_with_its_line(
    tmp_path: Path, text: str, place: str, problem: str, reference: str
) -> None:
    sentence = refused(reference, written(tmp_path, text))
    assert f"{tmp_path / 'train.py'}{place}, {problem}" in sentence


def test_the_traceback_of_the_program_is_kept(tmp_path: Path) -> None:
    written(tmp_path, "def f():\n    1 / 0\nf()\n")
    with pytest.raises(InvalidProgram) as caught:
        load_program("train.py:Model", tmp_path, dataset_dir=DATA)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    story = "".join(traceback.format_exception(caught.value.__cause__))
    assert "1 / 0" in story
    assert "f()" in story


def test_a_file_that_failed_to_import_leaves_no_module_behind(tmp_path: Path) -> None:
    before = set(sys.modules)
    refused("train.py:Model", written(tmp_path, "1 / 0"))
    assert set(sys.modules) == before


def test_a_name_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    sentence = refused("train.py:Modle", written(tmp_path))
    assert sentence.endswith("train.py defines no 'Modle': it has Model")
    assert "it has no class" in refused("train.py:Modle", written(tmp_path, ""))


@pytest.mark.parametrize("text", ["Model = 3", "import json as Model"])
def test_what_is_neither_a_class_nor_a_program_is_refused(tmp_path: Path, text: str) -> None:
    sentence = refused("train.py:Model", written(tmp_path, text))
    assert "not a program: name a class that has initial, gradient and update" in sentence


def test_a_class_that_cannot_be_made_is_told_with_its_line(tmp_path: Path) -> None:
    text = f"class Model:\n    def __init__(self):\n        raise OSError('no disk')\n{FUNCTIONS}"
    sentence = refused("train.py:Model", written(tmp_path, text))
    assert "the program 'train.py:Model' cannot be created: " in sentence
    assert f"{tmp_path / 'train.py'}:3, OSError: no disk" in sentence


def test_what_is_a_sentence_already_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(DatasetMissing, match="the data set the data does not exist"):
        load_program("muster.training.classifier:Classifier", tmp_path, dataset_dir=DATA)


def test_a_class_that_wants_more_than_the_directory_is_refused(tmp_path: Path) -> None:
    text = f"class Model:\n    def __init__(self, data, size): ...\n{FUNCTIONS}"
    assert "needs the arguments data and size" in refused("train.py:Model", written(tmp_path, text))


def test_a_program_with_functions_missing_is_refused_with_their_names(tmp_path: Path) -> None:
    text = "class Model:\n    def initial(self, seed): ...\n    update = 3"
    sentence = refused("train.py:Model", written(tmp_path, text))
    assert "has no gradient and update: it needs initial, gradient and update" in sentence


def test_a_function_that_takes_something_else_is_refused(tmp_path: Path) -> None:
    text = PROGRAM.replace("batch, random", "batch")
    sentence = refused("train.py:Model", written(tmp_path, text))
    assert "cannot be called as gradient(state, batch, random): too many" in sentence


@pytest.mark.parametrize("name", ["Nope", "Model", "train"])
@pytest.mark.parametrize("place", ["train.py", "train"], ids=["file", "module"])
def test_a_script_that_trains_by_itself_is_refused_before_it_does(
    tmp_path: Path, place: str, name: str
) -> None:
    text = "import muster\ndef train(): muster.join()\n" + PROGRAM
    script = text if name == "train" else f"{text}\ntrain()\nraise AssertionError(1)\n"
    sentence = refused(f"{place}:{name}", written(tmp_path, script))
    assert sentence.startswith(f"'{place}:{name}' is a script, not a program: it calls muster.join")
    assert 'Submit it as "command"' in sentence


def test_after_a_program_was_loaded_or_refused_a_script_may_join(tmp_path: Path) -> None:
    load_program("train.py:Model", written(tmp_path), dataset_dir=DATA)
    refused("train.py:Nope", tmp_path)
    refuse_while_loaded()
