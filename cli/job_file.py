"""A job as a YAML file (JSON is YAML), with the place of every field, so that errors can say it."""

import errno
import os
import select
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import yaml

from cli.description import SUFFIXES
from cli.yaml_problem import yaml_problem
from muster.contracts.errors import MusterError
from muster.plain_yaml import plain

Place: TypeAlias = tuple[str | int, ...]
"""A field and what is in it: ``("env", "LR")`` or ``("command", 0)``."""

PATIENCE_SECONDS: Final = 5.0
"""With a pipe through which nothing comes."""

_NAME_TAGS: Final = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"}
"""Of what is a name as it is written, and of `<<`, with which a mapping takes in another."""

_LOADER: Final = plain(yaml.SafeLoader)

_FLOAT_TAG: Final = "tag:yaml.org,2002:float"
_ENDLESS: Final = {".inf", ".nan"}
"""Floats of YAML that JSON does not know."""


class Spot(NamedTuple):
    """A place in the text: line and column, from 1, and what stands there if it is one word."""

    line: int
    column: int
    word: str | None


class InvalidJobFile(MusterError):
    """It is no file, or no YAML, or describes something else than a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """What it says, and where."""

    name: str
    fields: Mapping[str, Any]
    marks: Mapping[Place, "Spot"]
    """Where each field is, and what is in it."""

    @classmethod
    def read(cls, path: Path) -> "JobFile":
        """Return the job of a file; raises `InvalidJobFile`."""
        name = str(path)
        if os.path.isdir(path):  # noqa: PTH112  Path's fails at long names
            raise InvalidJobFile(
                f"{name} is a directory: name the job file in it, or what to run there, such as "
                f"muster submit -- python {path / 'train.py'}"
            )
        if path.suffix not in SUFFIXES:
            raise InvalidJobFile(
                f"{name} is no {' or '.join(SUFFIXES)}: for a script say muster submit -- python "
                f"{name}"
            )
        try:
            text = _content(path).decode()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InvalidJobFile(f"{name} cannot be read: {why}") from error
        fields, marks = _parsed(name, text)
        if not isinstance(fields, dict):
            raise InvalidJobFile(f"{name}:1:1: write fields of a job, such as world_size: 4")
        return cls(name=name, fields=fields, marks=marks)

    def place(self, place: Place) -> str:
        """Return ``job.yaml:4:3`` of the nearest thing that has a line."""
        line, column = self.line_and_column(place)
        return f"{self.name}:{line}:{column}"

    def line_and_column(self, place: Place) -> tuple[int, int]:
        """Return where the nearest thing is that has a line."""
        while place and place not in self.marks:
            place = place[:-1]
        spot = self.marks.get(place)
        return (1, 1) if spot is None else (spot.line, spot.column)

    def word(self, place: Place) -> str | None:
        """Return the one word or number there as it is written: YAML reads ``yes`` as true."""
        spot = self.marks.get(place)
        return spot and spot.word


def _content(path: Path) -> bytes:
    """Return all that is in the file, or comes through the pipe; raises `OSError`."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123  its flags
        # A pipe is one's own way to make a job, but opening one waits for ever for a writer.
        if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            if not select.select([file], [], [], PATIENCE_SECONDS)[0]:
                raise TimeoutError(errno.ETIMEDOUT, "it is a pipe that nobody writes to")
            os.set_blocking(file.fileno(), True)
        return file.read()


def _parsed(name: str, text: str) -> tuple[object, Mapping[Place, Spot]]:
    try:
        loader = _LOADER(text)
        root = loader.get_single_node()
        if root is None:
            return None, {}
        marks = dict(_marks(root, ()))
        return loader.construct_document(root), marks
    except yaml.MarkedYAMLError as error:
        at = f":{_mark(error.problem_mark)}" if error.problem_mark else ""
        raise InvalidJobFile(f"{name}{at}: {_trouble(error, text)}") from error
    except Exception as error:
        raise InvalidJobFile(f"{name} is no YAML: {yaml_problem(error)}") from error


def _trouble(error: yaml.MarkedYAMLError, text: str) -> str:
    """Return what is wrong; of what was opened and not closed, also where it was opened."""
    said = yaml_problem(error)
    began, found = error.context_mark, error.problem_mark
    if open_ := _unclosed(text):
        return f"{said} (nothing closes the bracket at {_mark(open_)})"
    if not error.problem or not error.context or began is None or began == found:
        return said
    return f"{said} ({error.context} that begins at {_mark(began)})"


def _unclosed(text: str) -> yaml.Mark | None:
    """Return where the innermost bracket is that is open at the end."""
    opened = list[yaml.Mark]()
    try:
        for token in yaml.scan(text):
            if isinstance(token, yaml.FlowSequenceStartToken | yaml.FlowMappingStartToken):
                opened.append(token.start_mark)
            elif isinstance(token, yaml.FlowSequenceEndToken | yaml.FlowMappingEndToken):
                del opened[-1:]
    except Exception:  # noqa: BLE001  whatever it is, it is not read to its end
        return None
    return opened[-1] if opened else None


def _marks(node: yaml.Node, place: Place) -> Iterator[tuple[Place, Spot]]:
    if isinstance(node, yaml.MappingNode):
        seen = set[str]()
        for key, value in node.value:
            _refuse_lost(key, seen)
            yield (*place, key.value), _spot(key, value)
            yield from _marks(value, (*place, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*place, index), _spot(item, item)
            yield from _marks(item, (*place, index))
    elif node.tag == _FLOAT_TAG and node.value.lstrip("+-").lower() in _ENDLESS:
        raise yaml.MarkedYAMLError(
            problem=f"{node.value} is no number that a job can have", problem_mark=node.start_mark
        )


def _refuse_lost(key: yaml.Node, seen: set[str]) -> None:
    """Raise for a name that is none, or that YAML would silently let the later one win of."""
    if not isinstance(key, yaml.ScalarNode):
        raise yaml.MarkedYAMLError(problem="is no name of a field", problem_mark=key.start_mark)
    if key.tag not in _NAME_TAGS:
        raise yaml.MarkedYAMLError(
            problem=f"{key.value} is no text here: put it in quotes", problem_mark=key.start_mark
        )
    if key.value in seen:
        raise yaml.MarkedYAMLError(
            problem=f"{key.value} is given twice", problem_mark=key.start_mark
        )
    seen.add(key.value)


def _spot(at: yaml.Node, value: yaml.Node) -> Spot:
    word = value.value if isinstance(value, yaml.ScalarNode) else None
    return Spot(*_position(at.start_mark), word)


def _position(mark: yaml.Mark) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _mark(mark: yaml.Mark) -> str:
    line, column = _position(mark)
    return f"{line}:{column}"
