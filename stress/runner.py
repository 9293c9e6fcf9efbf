"""What the harnesses share: arguments, randomness, a temporary directory, progress and the verdict.

A harness is a function `run(directory, ...)` that returns a `Report`. Its other parameters are the
arguments of the command, by position or, keyword-only ones, by name: ``--seed``.
"""

import argparse
import inspect
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn


@dataclass
class Report:
    """The result of a run."""

    lines: list[str] = field(default_factory=list)
    """The figures, for a terminal."""
    faults: list[str] = field(default_factory=list)
    """What must not be, one sentence each: a run with any has failed."""

    def __str__(self) -> str:
        return "\n".join([*self.lines, *(f"FAILED  {fault}" for fault in self.faults)])


def main(run: Callable[..., Report]) -> NoReturn:
    """Run a harness in a temporary directory, print its report, and exit with 1 if it failed."""
    # On SIGTERM, end all processes that were started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asked = parse(run, sys.argv[1:])
    again = f"again: {command(run, asked)}"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        try:
            report = run(Path(directory), **asked)
        except BaseException:
            say(again)
            raise
    say(str(report))
    verdict = f"{len(report.faults)} checks FAILED" if report.faults else "every check held"
    say(f"{verdict} after {time.monotonic() - began:.0f} s", *([again] if report.faults else []))
    sys.exit(1 if report.faults else 0)


def parse(run: Callable[..., Report], words: Sequence[str]) -> dict[str, object]:
    """Return the arguments for `run`; exits the process if they are invalid."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {_module(run)}",
        description=sys.modules[run.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for it in _parameters(run):
        name, more = (it.name, {"nargs": "?"}) if _is_positional(it) else (f"--{it.name}", {})
        kind = type(it.default)
        parser.add_argument(name, type=kind, default=it.default, help="%(default)s", **more)
    return vars(parser.parse_args(words))


def command(run: Callable[..., Report], asked: Mapping[str, object]) -> str:
    """Return the command that repeats a run."""
    words = ["python", "-m", _module(run)]
    for it in _parameters(run):
        if _is_positional(it):
            words.append(str(asked[it.name]))
        elif asked[it.name] != it.default:
            words += [f"--{it.name}", str(asked[it.name])]
    return shlex.join(words)


def say(*lines: str) -> None:
    """Print progress, at once."""
    for line in lines:
        print(line, flush=True)


def chance(seed: object) -> random.Random:
    """Return a source of random numbers that a run with the same seed repeats."""
    return random.Random(str(seed))  # noqa: S311  repeatable on purpose, no secret


def _module(run: Callable[..., Report]) -> str:
    spec = sys.modules[run.__module__].__spec__
    return str(spec.name if spec else run.__module__).removesuffix(".__main__")


def _parameters(run: Callable[..., Report]) -> list[inspect.Parameter]:
    return list(inspect.signature(run).parameters.values())[1:]


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD
