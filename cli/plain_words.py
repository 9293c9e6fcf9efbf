"""Most words of a command line are plain: to read them, pydantic need not be imported.

Typer reads every value with pydantic, and that takes longer to import than all else a small
command needs. Plain texts, whole numbers and choices are read here; everything else is left to
Typer, and so is every refusal (docs/notes/command-line.md), though not its words.
"""

import re
from enum import Enum
from typing import Any, Final, Self, get_args, get_origin

import typer
from typer.core import TyperArgument, TyperOption
from typer.models import ParameterInfo

_NOT_PLAIN: Final = object()


def read_plainly(command: Any) -> None:  # noqa: ANN401  Typer's own click
    """Let a command, and those below it, read plain words by themselves."""
    of_typer = command.get_params

    def get_params(context: Any) -> list[Any]:  # noqa: ANN401  as above
        parameters: list[Any] = of_typer(context)  # with one for --help, which nobody else lists
        for parameter in parameters:
            if _is_readable(parameter) and not isinstance(parameter.get_runtime_param, _Reader):
                parameter.get_runtime_param = _Reader(parameter)
        return parameters

    command.get_params = get_params
    for below in getattr(command, "commands", {}).values():
        read_plainly(below)


def _is_readable(parameter: Any) -> bool:  # noqa: ANN401  Typer's own
    """Whether Typer keeps here what we stand in for: of its own affairs it may change its mind."""
    descriptor = getattr(parameter, "type_descriptor", None)
    return hasattr(parameter, "get_runtime_param") and all(
        hasattr(descriptor, name) for name in ("annotation", "parameter_info")
    )


class _Reader:
    """Stands in the place of what Typer reads a parameter with."""

    def __init__(self, parameter: TyperArgument | TyperOption) -> None:
        self._kind = parameter.type_descriptor.annotation
        self._info = parameter.type_descriptor.parameter_info
        self._get_typers = parameter.get_runtime_param

    def __call__(self) -> Self:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:  # noqa: ANN401  Typer's own
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        read = read_value(value, self._kind, self._info)
        if read is not _NOT_PLAIN:
            return read
        try:
            return self._get_typers().coerce(value, param, ctx)
        except typer.BadParameter as error:
            error.message = why_refused(value, self._kind, self._info) or error.message
            raise


def read_value(value: Any, kind: Any, info: ParameterInfo) -> Any:  # noqa: ANN401  of any kind
    """Return `value` as one of `kind`, or `_NOT_PLAIN`."""
    if get_origin(kind) is list and isinstance(value, list | tuple):
        read = [_read_one(item, get_args(kind)[0], info) for item in value]
        return _NOT_PLAIN if _NOT_PLAIN in read else read
    return _read_one(value, kind, info)


def _read_one(value: Any, kind: Any, info: ParameterInfo) -> Any:  # noqa: ANN401  of any kind
    if info.parser is not None or not isinstance(kind, type):
        return _NOT_PLAIN
    if kind in {str, bool} and type(value) is kind:
        return value
    if issubclass(kind, Enum):
        return next((word for word in kind if value in (word, word.value)), _NOT_PLAIN)
    if kind is float and type(value) is float:  # a default
        return _within(value, info)
    if kind is int and re.fullmatch(r"[0-9]{1,18}", str(value)):
        return _within(int(value), info)
    return _NOT_PLAIN


def why_refused(value: Any, kind: Any, info: ParameterInfo) -> str | None:  # noqa: ANN401  of any kind
    """Return what is wrong with `value`; None for what Typer says itself, or a parser of ours."""
    if info.parser is not None:
        return None
    values = value if isinstance(value, list | tuple) else [value]
    kinds = get_args(kind) or (kind,)  # of a list, or of what may be None
    said = (_why_one_is(item, of, info) for item in values for of in kinds)
    return next(filter(None, said), None)


def _why_one_is(value: Any, kind: Any, info: ParameterInfo) -> str | None:  # noqa: ANN401  of any kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = [str(word.value) for word in kind]
        return None if value in words else f"{value!r} is none of {', '.join(words)}"
    if kind not in {int, float}:
        return None
    try:
        number = kind(value)
    except ValueError:
        return f"{value!r} is no {'whole number' if kind is int else 'number'}"
    if info.min is not None and number < info.min:
        return f"{value} is less than {info.min}"
    if info.max is not None and number > info.max:
        return f"{value} is more than {info.max}"
    return None


def _within(number: float, info: ParameterInfo) -> Any:  # noqa: ANN401  it, or not
    is_above = info.min is None or number >= info.min
    is_below = info.max is None or number <= info.max
    return number if is_above and is_below else _NOT_PLAIN
