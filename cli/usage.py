"""What a command's usage calls its arguments: what they are typed as, in no braces around them."""

import re
from typing import Any, Final

_LAST_DOTS: Final = re.compile(r"(\.\.\.)?$")


def name_plainly(command: Any) -> None:  # noqa: ANN401  Typer's own click
    """Let a command, and those below it, name arguments as their ``metavar`` does."""

    def collect_usage_pieces(context: Any) -> Any:  # noqa: ANN401  as above
        parameters = command.get_params(context)
        arguments = [it for it in parameters if it.param_type_name == "argument"]
        if any(it.metavar is None for it in arguments):
            return of_typer(context)
        return [command.options_metavar, *(it.metavar for it in arguments)]

    below = getattr(command, "commands", {}).values()
    of_typer = command.collect_usage_pieces
    if not below:
        command.collect_usage_pieces = collect_usage_pieces
    for each in below:
        name_plainly(each)


def first_word(metavar: str) -> str:
    """Return what is missing where nothing of an argument was typed: ``SCRIPT``, ``JOB``."""
    return _LAST_DOTS.sub("", metavar.split(maxsplit=1)[0])
