"""A job as a person describes it: in a YAML file (JSON is YAML), on the command line, or both.

Errors name the file, line and column. Relative paths are made absolute here, because the server
may run in another directory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from cli.errors import Misuse
from muster.client.errors import FieldError

Location: TypeAlias = Sequence[str | int]
"""A field and what is in it: ``("env", "LR")`` or ``("command", 0)``."""

SUFFIXES: Final = (".yaml", ".yml", ".json")
PATH_FIELDS: Final = ("dataset_dir", "checkpoint_dir", "working_dir")

# `type` of a field error of the API
_UNKNOWN_FIELD: Final = "extra_forbidden"
_NOT_TEXT: Final = "string_type"


class InvalidJobFile(Misuse):
    """The file cannot be read, is not YAML, or does not describe a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """The fields of a job file, and where each of them stands."""

    name: str
    fields: Mapping[str, Any]
    root: Node

    @classmethod
    def read(cls, path: Path) -> JobFile:
        """Return the job of a file; raises `InvalidJobFile`."""
        if path.suffix not in SUFFIXES:
            raise InvalidJobFile(
                f"{path} is not a job file ({', '.join(SUFFIXES)}); to run a command, write -- "
                f"before it: muster submit -- python train.py"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidJobFile(f"{path} cannot be read: {reason}") from error
        try:
            root, fields = _yaml().compose(text), _yaml().load(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark
            at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
            raise InvalidJobFile(f"{path}{at}: {_reason(error)}") from error
        except (YAMLError, ValueError, RecursionError) as error:
            raise InvalidJobFile(f"{path}: invalid YAML: {error}") from error
        if not isinstance(fields, dict):
            raise InvalidJobFile(f"{path}:1:1: expected fields of a job, such as world_size: 4")
        return cls(name=str(path), fields=fields, root=root)

    def position(self, location: Location) -> tuple[int, int]:
        """Return line and column, from 1, of a field or of what encloses it."""
        mark, _ = self._find(location)
        return mark.line + 1, mark.column + 1

    def scalar(self, location: Location) -> str | None:
        """Return a single value as it is written in the file."""
        _, node = self._find(location)
        return node.value if isinstance(node, ScalarNode) else None

    def _find(self, location: Location) -> tuple[Any, Node | None]:
        mark, node = self.root.start_mark, self.root
        for part in location:
            if isinstance(node, MappingNode):
                found = [(key, value) for key, value in node.value if key.value == part]
            elif isinstance(node, SequenceNode) and isinstance(part, int):
                found = [(item, item) for item in node.value[part : part + 1]]
            else:
                found = []
            if not found:
                return mark, None
            key, node = found[0]
            mark = key.start_mark
        return mark, node


def parse_value(text: str) -> Any:  # noqa: ANN401  any YAML value
    """Return the value of ``--set FIELD=VALUE``; raises `ValueError` for invalid YAML."""
    try:
        return _yaml().load(text)
    except MarkedYAMLError as error:
        raise ValueError(_reason(error)) from error
    except YAMLError as error:
        raise ValueError(str(error)) from error


def _yaml() -> YAML:
    # The pure parser knows YAML 1.2, in which 12:30 and yes are text, and refuses duplicate keys.
    return YAML(typ="safe", pure=True)


def _reason(error: MarkedYAMLError) -> str:
    problem = str(error.problem or "invalid YAML")
    opened, found = error.context_mark, error.problem_mark
    if not error.context or opened is None or opened == found:
        return problem
    return f"{problem} ({error.context} that begins at {opened.line + 1}:{opened.column + 1})"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """All fields of a job that a person gave; the command line takes precedence over the file."""

    file: JobFile | None
    typed: Mapping[str, Any]
    mappings: Mapping[str, Mapping[str, str]]
    """`env` and `secrets` from the command line, which are added to those of the file."""

    def body(self, directory: Path) -> dict[str, Any]:
        """Return the request body; paths are relative to `directory`.

        A command or program runs there as well, unless `working_dir` is given.
        """
        body = {**(self.file.fields if self.file else {}), **self.typed}
        for field, typed in self.mappings.items():
            given = body.get(field) or {}
            if typed and isinstance(given, Mapping):  # the server refuses any other type
                body[field] = {**given, **typed}
        if body.get("working_dir") is None and (body.get("command") or body.get("program")):
            body["working_dir"] = str(directory)
        for field in PATH_FIELDS:
            if isinstance(path := body.get(field), str):
                # Unlike Path.resolve, abspath treats links and ".." as a shell does.
                body[field] = os.path.abspath(directory / os.path.expanduser(path))  # noqa: PTH100, PTH111
        return body

    def error_lines(self, errors: Sequence[FieldError]) -> Iterator[str]:
        """Yield a line per invalid field: those of the file in its order, then the others."""
        for error in sorted(errors, key=self._order):
            location = error.loc[1:]  # after "body"
            field = ".".join(map(str, location)) or str(error.loc[0])
            unknown = "muster schema lists the fields" if error.type == _UNKNOWN_FIELD else None
            hint = error.hint or self._quoted(error) or unknown
            file = self._file_of(location)
            at = (
                "muster"
                if file is None
                else ":".join(map(str, (file.name, *file.position(location))))
            )
            yield f"{at}: {field}: {error.msg}" + (f" ({hint})" if hint else "")

    def _quoted(self, error: FieldError) -> str | None:
        """Return a hint for text that YAML reads as a number, such as ``env: {LR: 0.1}``."""
        location = error.loc[1:]
        file = self._file_of(location)
        if error.type != _NOT_TEXT or file is None or location[0] == "secrets":
            return None
        word = file.scalar(location)
        return f'write "{word}"' if word else None

    def _order(self, error: FieldError) -> tuple[float, ...]:
        file = self._file_of(error.loc[1:])
        return (math.inf,) if file is None else file.position(error.loc[1:])

    def _file_of(self, location: Location) -> JobFile | None:
        """Return the file if it is where a field was given."""
        is_in_file = (
            self.file is not None
            and bool(location)
            and location[0] in self.file.fields
            and location[0] not in self.typed
        )
        return self.file if is_in_file else None
