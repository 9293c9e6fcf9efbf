"""``muster`` as a group of verbs, of which only the one that was said is imported."""

import os
import traceback
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import Abort, Exit, TyperException

from cli.plain_words import read_plainly
from cli.preferences import settle
from cli.verbs import ALIASES, HEADINGS, SAID_ELSEWHERE, VERBS
from muster.contracts.endings import INTERRUPTED_CODE
from muster.contracts.errors import InvalidEnvironment


class Vocabulary(TyperGroup):
    """Holds a stand-in for each verb: enough for help, for completion and for a suggestion."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401  Typer's own
        super().__init__(**attributes)
        read_plainly(self)
        for name, verb in VERBS.items():
            self.add_command(TyperCommand(name, help=verb.help))
        for name, meant in ALIASES.items():
            self.add_command(TyperCommand(name, help=VERBS[meant].help, hidden=True))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401  Typer's own click
        """Put the verb in the place of its stand-in."""
        meant = SAID_ELSEWHERE.get(args[0])
        if meant is not None:
            ctx.fail(f"there is no verb {args[0]!r}: {_way_to(meant)}")
        name, stand_in, rest = super().resolve_command(ctx, args)
        if name is None:
            return name, stand_in, rest
        return name, VERBS[ALIASES.get(name, name)].load(name), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401, ARG002  as above
        """Write the verbs under their headings."""
        width = max(map(len, VERBS))
        for heading, verbs in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(f"{name:<{width}}", verb.help) for name, verb in verbs.items()]
                )

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  as above
        """With ``--debug``, say where an error came from; what it says comes after that."""
        try:
            settle(os.environ)
            return super().invoke(ctx)
        except TyperException as error:
            from cli.refusals import plainly  # noqa: PLC0415  --help

            raise plainly(error) from None
        except Abort:  # Ctrl-C at a question, which Typer would call a failure
            raise Exit(INTERRUPTED_CODE) from None
        except Exit:  # the command line's own way to end
            raise
        except InvalidEnvironment as error:
            from cli.origins import placed  # noqa: PLC0415  --help

            _show_origin(ctx)
            raise placed(error, os.environ) from None
        except Exception:
            _show_origin(ctx)
            raise


def _show_origin(context: Any) -> None:  # noqa: ANN401  as above
    """Say where in Muster an error came from, to whoever has asked."""
    if context.params["debug"]:
        typer.echo(traceback.format_exc(), err=True)


def _way_to(meant: str) -> str:
    """Return where that is done which another tool calls otherwise."""
    verb = VERBS.get(meant)
    if verb is None:
        return f"say muster {meant}"
    return f"muster {meant} does that: {verb.help[0].lower()}{verb.help[1:]}"
