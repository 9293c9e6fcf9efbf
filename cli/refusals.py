"""What the library that reads a command line refuses, in our words."""

from difflib import get_close_matches
from typing import Any, Final

import typer
from typer.exceptions import TyperException

from cli.usage import first_word
from cli.verbs import VARIABLES

LIKE: Final = 0.7
"""How near a word has to be to an option's, its dashes aside, to be taken for it, misspelt."""


class _Plain(typer.BadParameter):
    """A refusal with no words of a library's before it."""

    def format_message(self) -> str:
        return self.message


def plainly(error: TyperException) -> TyperException:
    """Return the refusal in our words, where those of the library mislead or repeat themselves."""
    option, context = str(getattr(error, "option_name", "")), getattr(error, "ctx", None)
    if option in VARIABLES:
        said = f"there is no option {option}: {VARIABLES[option]} in the environment says it"
        return _Plain(said, context)
    if hasattr(error, "possibilities"):
        near = nearest(option, context)
        meant = f" (did you mean {near}?)" if near else ""
        return _Plain(f"{getattr(error, 'message', '')}{meant}", context)
    if not isinstance(error, typer.BadParameter):
        return error
    if not (error.param or error.param_hint):
        return _Plain(error.message, error.ctx)
    if hasattr(error, "param_type") and error.param and error.param.metavar:
        error.param_hint = f"'{first_word(error.param.metavar)}'"
    return error


def nearest(option: str, context: Any) -> str | None:  # noqa: ANN401  Typer's own click
    """Return the option of a command that was probably meant by one that it does not have."""
    if context is None:
        return None
    shown = [it for it in context.command.get_params(context) if not getattr(it, "hidden", False)]
    known = [name.lstrip("-") for it in shown for name in it.opts if name.startswith("--")]
    word = option.lstrip("-")
    begun = [name for name in known if len(word) > 1 and name.startswith(word)]
    near = begun or get_close_matches(word, known, n=1, cutoff=LIKE)
    return f"--{near[0]}" if near else None
