"""From a reference such as ``train.py:Model`` to the program it means, or a sentence why not.

Nothing that a person's file does while it is imported, named or called ends in a traceback alone:
the sentence says what happened and on which line of theirs, and the traceback is its `__cause__`.
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

from muster.contracts.endings import DO_NOT_RETRY_CODE
from muster.contracts.errors import MusterError
from muster.program import InvalidProgram, Program, ProgramRaised, loaded_as

FUNCTIONS: Final = {
    "initial": ("seed",),
    "gradient": ("state", "batch", "random"),
    "update": ("state", "gradients", "step"),
}
"""What a program has to have, and what each is called with."""

_EXAMPLE: Final = "such as train.py:Model or package.module:Model"


def load(reference: str, working_dir: Path, *, dataset_dir: Path) -> Program:
    """Return the program that `reference` names, or raise `InvalidProgram`.

    ``file.py:Name`` is a file, from `working_dir` on. It is imported anew under a name that nothing
    else has, with its own directory first on the path, as Python does for a script.
    ``package.module:Name`` is imported with `working_dir` first on the path. A class or a function
    is called, with `dataset_dir` if it takes an argument; any other object is the program itself.
    """
    module_name, _, name = reference.rpartition(":")
    if not module_name or not name:
        raise InvalidProgram(f"the program {reference!r} names no class: write {_EXAMPLE}")
    with loaded_as(reference):
        return _loaded(module_name, name, reference, working_dir, dataset_dir)


def _loaded(
    module_name: str, name: str, reference: str, working_dir: Path, dataset_dir: Path
) -> Program:
    if module_name.endswith(".py"):
        module = _module_of_file(working_dir / module_name, reference)
    else:
        module = _module_named(module_name, working_dir, reference)
    found = _found(module, name, reference)
    with their_errors(f"the program {reference!r} cannot be made", working_dir):
        made = _made(found, reference, dataset_dir)
    _check_functions(made, reference)
    return cast("Program", made)


def _module_of_file(file: Path, reference: str) -> ModuleType:
    if not file.is_file():
        raise InvalidProgram(
            f"the program {reference!r} cannot be loaded, because there is no file {file}: "
            "name one, from the job's working directory on"
        )
    # A name of its own: a person's file may be called as one of our modules, or as numpy.
    spec = spec_from_file_location(f"_muster_program_{secrets.token_hex(8)}", file)
    if spec is None or spec.loader is None:
        raise InvalidProgram(f"{file} is no Python file: name one that ends in .py")
    module = module_from_spec(spec)
    _put_first(file.parent)
    # Dataclasses, for one, look for their module there.
    sys.modules[spec.name] = module
    try:
        with their_errors(f"{file} cannot be imported", file.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def _module_named(module_name: str, working_dir: Path, reference: str) -> ModuleType:
    _put_first(working_dir)
    with their_errors(f"the module of the program {reference!r} cannot be imported", working_dir):
        return importlib.import_module(module_name)


def _put_first(directory: Path) -> None:
    entry = str(directory.absolute())
    if entry in sys.path:
        sys.path.remove(entry)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()


def _found(module: ModuleType, name: str, reference: str) -> object:
    try:
        return getattr(module, name)
    except AttributeError:
        own = sorted(
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        )
        hint = f"it has {', '.join(own)}" if own else "it has no class at all"
        raise InvalidProgram(
            f"the program {reference!r} cannot be loaded, because {module.__file__} defines no "
            f"{name!r}: {hint}"
        ) from None


def _made(found: object, reference: str, dataset_dir: Path) -> object:
    if not callable(found):
        if hasattr(found, "gradient"):
            return found
        raise InvalidProgram(
            f"{reference!r} is a {type(found).__name__}, which is no program: name a class that "
            f"has {_listed(FUNCTIONS)}"
        )
    return found(dataset_dir) if _takes_an_argument(found, reference) else found()


def _takes_an_argument(make: Any, reference: str) -> bool:  # noqa: ANN401  whatever they named
    """Say whether `make` has to be given something; what has a default is left alone."""
    required = [
        parameter.name
        for parameter in inspect.signature(make).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) > 1:
        raise InvalidProgram(
            f"the program {reference!r} cannot be made without {_listed(required)}: let it take "
            "nothing, or the directory of the data set alone"
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
def their_errors(what: str, directory: Path) -> Iterator[None]:
    """Turn what a person's code below `directory` raises into `InvalidProgram`, naming the line.

    What is a `MusterError` is let through. Theirs is the `__cause__`, with its traceback.
    """
    try:
        yield
    except MusterError:  # a sentence already, such as one about the data set
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == DO_NOT_RETRY_CODE:
            raise
        raise InvalidProgram(
            f"{what}: {_place(error, directory)}{type(error).__name__}: {error}. Correct it, and "
            "submit the job again"
        ) from error


def raised_in(function: str, step: int, error: Exception) -> ProgramRaised:
    """Return what to raise from an error of a program's function in a step; it names the line."""
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
    theirs = [frame for frame in frames if _is_theirs(Path(frame.filename), directory)]
    innermost = (theirs or frames)[-1:]
    return "".join(f"{frame.filename}:{frame.lineno}, " for frame in innermost)


def _is_theirs(file: Path, directory: Path) -> bool:
    return file.is_relative_to(directory.absolute()) and "site-packages" not in file.parts


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last
