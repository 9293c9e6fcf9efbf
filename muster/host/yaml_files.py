"""YAML files that a person wrote: read with limits, and with the place of each value."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from muster.contracts.errors import InvalidDescription

Location: TypeAlias = Sequence[str | int]
"""A value and what is in it: ``("env", "LR")`` or ``("command", 0)``."""

SIZE_LIMIT_BYTES: Final = 1 << 20
CHARACTERS_LIMIT: Final = 16 << 20
VALUES_LIMIT: Final = 10_000
"""More than any job or cluster file has. Few lines with aliases stand for billions of values."""
SMALLER: Final = "keep data in other files"


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlFile:
    """The content of a file, and where each value stands."""

    name: str
    content: Any
    root: Any
    """The node that ruamel.yaml composes; None for an empty file."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the content of a file; raises `InvalidDescription`."""
        try:
            with path.open("rb") as file:  # a pipe or a device does not tell its size
                content = file.read(SIZE_LIMIT_BYTES + 1)
            if len(content) > SIZE_LIMIT_BYTES:
                most = f"{SIZE_LIMIT_BYTES >> 20} MiB"
                raise InvalidDescription(f"{path} is larger than {most}: {SMALLER}")
            text = content.decode()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidDescription(f"{path} cannot be read: {reason}") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """Return the content of a text, which errors call `name`; raises `InvalidDescription`."""
        try:
            root = safe_yaml().compose(text)
            if _has_too_many_values(root):
                most = f"{VALUES_LIMIT:,} values or 16 MiB, aliases expanded"
                raise InvalidDescription(f"{name} has more than {most}: {SMALLER}")
            return cls(name=name, content=safe_yaml().load(text), root=root)
        except MarkedYAMLError as error:
            mark = error.problem_mark
            at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
            raise InvalidDescription(f"{name}{at}: {reason_of(error)}") from error
        except (YAMLError, ValueError, RecursionError) as error:
            raise InvalidDescription(f"{name}: invalid YAML: {error}") from error

    def position(self, location: Location) -> tuple[int, int]:
        """Return line and column, from 1, of a value or of what encloses it."""
        if self.root is None:
            return 1, 1
        mark, node = self.root.start_mark, self.root
        for part in location:
            if node.id == "mapping":
                found = [(key, value) for key, value in node.value if key.value == part]
            elif node.id == "sequence" and isinstance(part, int):
                found = [(item, item) for item in node.value[part : part + 1]]
            else:
                found = []
            if not found:
                break
            key, node = found[0]
            mark = key.start_mark
        return mark.line + 1, mark.column + 1


def safe_yaml() -> YAML:
    """Return a parser of YAML 1.2, in which 12:30 and yes are text; it refuses duplicate keys."""
    return YAML(typ="safe", pure=True)


def reason_of(error: MarkedYAMLError) -> str:
    """Return what is wrong with a text and where that begins."""
    opened = error.context_mark
    begins = f"that begins at {opened.line + 1}:{opened.column + 1}" if opened else ""
    return f"{error.problem} ({error.context} {begins})" if begins else str(error.problem)


def _has_too_many_values(root: Any) -> bool:  # noqa: ANN401  as `YamlFile.root`
    count, characters, nodes = 1, 0, [root] if root else []
    while nodes and count <= VALUES_LIMIT and characters <= CHARACTERS_LIMIT:
        node = nodes.pop()
        inner = node.value if node.id in {"mapping", "sequence"} else []
        nodes += [pair[1] for pair in inner] if node.id == "mapping" else inner
        count += len(inner)
        characters += len(node.value) if node.id == "scalar" else 0
    return count > VALUES_LIMIT or characters > CHARACTERS_LIMIT
