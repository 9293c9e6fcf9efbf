"""Loads the program that a reference such as ``train.py:Model`` names.

An error in the user's file becomes one sentence that names the line; the error itself, with its
traceback, is the `__cause__`.
"""

import importlib
import inspect
import secrets
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

from muster.contracts.errors import MusterError
from muster.contracts.interpreter import import_advice
from muster.contracts.job.retry import DO_NOT_RETRY_CODE
from muster.contracts.location import Location
from muster.program import InvalidProgram, Program, ProgramRaised, loaded_as

FUNCTIONS: Final = {
    "initial": ("seed",),
    "gradient": ("state", "batch", "random"),
    "update": ("state", "gradients", "step"),
}
"""The functions that a program must have, and their arguments."""

_EXAMPLE: Final = "such as train.py:Model or package.module:Model"


def load_program(reference: str, working_dir: Path, *, dataset_dir: Location) -> Program:
    """Return the program that `reference` names, or raise `InvalidProgram`.

    ``file.py:Name`` is a file relative to `working_dir`. It is imported under a unique module name,
    with its own directory first on the path, as Python does for a script.
    ``package.module:Name`` is imported with `working_dir` first on the path. A class or a function
    is called, with `dataset_dir` if it takes an argument; any other object is the program itself.
    """
    module_name, _, name = reference.rpartition(":")
    if not module_name or not name:
        raise InvalidProgram(f"the program {reference!r} names no class: write {_EXAMPLE}")
    with loaded_as(reference):
        if module_name.endswith(".py"):
            module = _import_file(working_dir / module_name, reference)
        else:
            _put_first(working_dir)
            problem = f"the module of the program {reference!r} cannot be imported"
            with report_program_errors(problem, working_dir):
                module = importlib.import_module(module_name)
        found = _attribute(module, name, reference)
        with report_program_errors(f"the program {reference!r} cannot be created", working_dir):
            program = _create(found, reference, dataset_dir)
        _check_functions(program, reference)
        return cast("Program", program)


def _import_file(file: Path, reference: str) -> ModuleType:
    if not file.is_file():
        raise InvalidProgram(
            f"the program {reference!r} cannot be loaded, because {file} does not exist: name a "
            "file relative to the job's working directory"
        )
    # A unique name: the file may be called like one of our modules, or numpy.py.
    spec = spec_from_file_location(f"_muster_program_{secrets.token_hex(8)}", file)
    if spec is None or spec.loader is None:
        raise InvalidProgram(f"{file} is not a Python file: name one that ends in .py")
    module = module_from_spec(spec)
    _put_first(file.parent)
    # Dataclasses look up their module in sys.modules.
    sys.modules[spec.name] = module
    try:
        with report_program_errors(f"{file} cannot be imported", file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _put_first(directory: Path) -> None:
    entry = str(directory.absolute())
    if entry in sys.path:
        sys.path.remove(entry)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()


def _attribute(module: ModuleType, name: str, reference: str) -> object:
    try:
        return getattr(module, name)
    except AttributeError:
        own = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        )
        hint = f"it has {', '.join(own)}" if own else "it has no class"
        raise InvalidProgram(
            f"the program {reference!r} cannot be loaded, because {module.__file__} defines no "
            f"{name!r}: {hint}"
        ) from None


def _create(found: object, reference: str, dataset_dir: Location) -> object:
    if not callable(found):
        if hasattr(found, "gradient"):
            return found
        raise InvalidProgram(
            f"{reference!r} is a {type(found).__name__}, not a program: name a class that "
            f"has {_listed(FUNCTIONS)}"
        )
    return found(dataset_dir) if _takes_argument(found, reference) else found()


def _takes_argument(factory: Any, reference: str) -> bool:  # noqa: ANN401  any callable
    """True if `factory` has a parameter without a default."""
    required = [
        parameter.name
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) > 1:
        raise InvalidProgram(
            f"the program {reference!r} needs the arguments {_listed(required)}: it may take "
            "none, or only the directory of the data set"
        )
    return bool(required)


def _check_functions(program: object, reference: str) -> None:
    missing = [name for name in FUNCTIONS if not callable(getattr(program, name, None))]
    if missing:
        raise InvalidProgram(
            f"the program {reference!r} has no {_listed(missing)}: it needs {_listed(FUNCTIONS)}"
        )
    for name, arguments in FUNCTIONS.items():
        try:
            inspect.signature(getattr(program, name)).bind(*arguments)
        except TypeError as error:
            raise InvalidProgram(
                f"{name} of the program {reference!r} cannot be called as "
                f"{name}({', '.join(arguments)}): {error}"
            ) from None


@contextmanager
def report_program_errors(problem: str, directory: Path) -> Iterator[None]:
    """Turn errors of the user's code below `directory` into `InvalidProgram` that names the line.

    A `MusterError` passes through. The original error is the `__cause__`, with its traceback.
    """
    try:
        yield
    except MusterError:  # already one clear sentence
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == DO_NOT_RETRY_CODE:
            raise
        missing = isinstance(error, ImportError) and import_advice(str(error), sys.executable)
        advice = missing or "Correct it, and submit the job again"
        raise InvalidProgram(
            f"{problem}: {_place(error, directory)}{type(error).__name__}: {error}. {advice}"
        ) from error


def program_error(function: str, step: int, error: Exception) -> ProgramRaised:
    """Return a `ProgramRaised` for an error of a program's function; it names the line."""
    return ProgramRaised(
        step,
        f"{function}() of the program failed at step {step}: "
        f"{_place(error, Path('/'))}{type(error).__name__}: {error}",
    )


def _place(error: BaseException, directory: Path) -> str:
    """Return ``file:line, `` of the innermost frame below `directory`, or of the innermost."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}, "
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen importlib")
    ]
    users = [
        frame
        for frame in frames
        if Path(frame.filename).is_relative_to(directory.absolute())
        and "site-packages" not in Path(frame.filename).parts
    ]
    innermost = (users or frames)[-1:]
    return "".join(f"{frame.filename}:{frame.lineno}, " for frame in innermost)


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
