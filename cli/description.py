"""A job as a person describes it: by a file, by what was typed, or both.

What is typed goes before the file. Relative paths are those of whoever types, so they are made
absolute before the server, which may run elsewhere, reads them.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from muster.client.errors import FieldError

if TYPE_CHECKING:
    from cli.job_file import JobFile

SUFFIXES: Final = (".yaml", ".yml", ".json")
"""Of a file that describes a job."""

UNKNOWN_FIELD: Final = "extra_forbidden"
"""How the API calls the error of a field that it does not know."""

NO_TEXT: Final = "string_type"
"""Likewise, of what is to be a text and is none."""

SEE_FIELDS: Final = "muster schema lists them"

PATHS: Final = ("dataset_dir", "checkpoint_dir", "working_dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Everything that was said of a job."""

    file: "JobFile | None"
    typed: Mapping[str, Any]
    """Fields by name."""
    mappings: Mapping[str, Mapping[str, str]]
    """What was typed of `env` and `secrets`: added to the file's."""

    def body(self, here: Path) -> dict[str, Any]:
        """Return what the server is asked for by somebody in the directory `here`.

        A command or program is run there, too, unless a field says where.
        """
        body = {**(self.file.fields if self.file else {}), **self.typed}
        for field, typed in self.mappings.items():
            given = body.get(field) or {}
            if typed and isinstance(given, Mapping):  # what is no mapping the server refuses
                body[field] = {**given, **typed}
        if body.get("working_dir") is None and (body.get("command") or body.get("program")):
            body["working_dir"] = str(here)
        for field in PATHS:
            if isinstance(body.get(field), str):
                body[field] = _absolute(body[field], here)
        return body

    def sentences(self, errors: Sequence[FieldError]) -> Iterator[str]:
        """Yield a line for each field that is wrong, with its place if the file has it.

        Those of the file come in the order of its lines, and what was typed after them.
        """
        for error in sorted(errors, key=self._order):
            # The first part says that it is of the body.
            place = error.loc[1:]
            where = ".".join(str(part) for part in place) or str(error.loc[0])
            said = error.hint or (SEE_FIELDS if error.type == UNKNOWN_FIELD else None)
            hint = f" ({said})" if said else ""
            at = self.file.place(place) if self.file and self._is_of_file(place) else "muster"
            yield f"{at}: {where}: {self._trouble(error)}{hint}"

    def _trouble(self, error: FieldError) -> str:
        """Return what is wrong; of what YAML has read as another word, in that of the file."""
        place = error.loc[1:]
        if (
            error.type == NO_TEXT
            and self.file
            and self._is_of_file(place)
            and place[0] != "secrets"
        ):
            word = self.file.word(place)
            if word:
                return f'{word} is no text: write "{word}"'
        return error.msg

    def _order(self, error: FieldError) -> tuple[float, ...]:
        place = error.loc[1:]
        is_of_file = self.file and self._is_of_file(place)
        return self.file.line_and_column(place) if self.file and is_of_file else (math.inf,)

    def _is_of_file(self, place: Sequence[str | int]) -> bool:
        fields = self.file.fields if self.file else {}
        return bool(place) and place[0] in fields.keys() - self.typed.keys()


def _absolute(path: str, here: Path) -> str:
    # As a shell does: a way through ".." is taken without asking what is a link.
    return os.path.abspath(here / os.path.expanduser(path))  # noqa: PTH100, PTH111
