"""Which of our own trainings a rank is to run, once it is known that it runs no command."""

from pathlib import Path
from typing import NoReturn

from muster.contracts.environ import RankSettings
from muster.departure import Account, interrupted, last_word, leave
from muster.line import Line
from muster.voice import Voice


def train(settings: RankSettings) -> NoReturn:
    """Train as the settings say, and end the process with it."""
    voice = Voice(Line.of(settings))
    account = Account(settings, voice)
    code = 1
    try:
        code = _main(settings, voice)
    except KeyboardInterrupt as error:
        # Nobody types at a rank of an agent: there it is an error like any other.
        code = interrupted() if settings.agent_fd is None else last_word(error)
    except BaseException as error:  # noqa: BLE001  nothing comes after it
        code = last_word(error)
    finally:
        leave(code, account)


def _main(settings: RankSettings, voice: Voice) -> int:
    if settings.mode == "synchronous":
        from muster.synchronous.allocator import keep_freed_memory  # noqa: PLC0415  what is needed
        from muster.synchronous.rank import main as train_together  # noqa: PLC0415  what is needed

        keep_freed_memory()
        return train_together(settings, Path.cwd(), voice)
    from muster.classifier import main as train_alone  # noqa: PLC0415  what is needed

    return train_alone(settings, voice)
