"""One rank: ``python -P -m worker`` reads its place from the environment and becomes the program.

A command is *exec*ed, so that the process keeps its pid, its channel and its log, and nothing of
ours stays in memory beside the user's program. Without a command it is a training of ours.
"""

import os
import signal
import sys
from typing import Final, NoReturn

from muster.containment import enclose
from muster.contracts.environ import MARK, THREAD_PINS, RankSettings
from muster.contracts.errors import InvalidEnvironment
from muster.contracts.job import Reason
from muster.contracts.messages import Executing, RankMessage, Refused
from muster.contracts.spec import JobSpec
from muster.line import Line
from muster.remarks import remark
from muster.voice import Voice
from worker.blame import is_of_the_command

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


def main() -> int:
    """Become the rank's program; return only if the environment cannot be read."""
    try:
        settings = RankSettings.read(os.environ, world_size=JobSpec().world_size)
    except InvalidEnvironment as error:
        remark(f"muster: {error}")
        return 2
    if MARK in os.environ:  # not when started by hand
        enclose(os.environ[MARK])
    if settings.command is not None:
        # By hand the defaults hold for the program, too.
        os.environ.setdefault("RANK", str(settings.rank))
        os.environ.setdefault("WORLD_SIZE", str(settings.world_size))
        become(settings.command, settings.agent_fd)
    return train(settings)


def train(settings: RankSettings) -> NoReturn:
    """Run a training of ours, and end the process with it."""
    for name, threads in THREAD_PINS.items():
        os.environ.setdefault(name, threads)
    from muster.training import train as train_as_told  # noqa: PLC0415  after the pins

    train_as_told(settings)


def become(command: tuple[str, ...], agent_fd: int | None) -> NoReturn:
    """Replace this process by `command`; say so to the agent, and say it if that fails."""
    if agent_fd is not None:
        os.set_inheritable(agent_fd, True)  # noqa: FBT003  the standard library's signature
    _tell(agent_fd, Executing())
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores them; a program may not expect it
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606  running the user's argv is the purpose
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        message = f"the command {command[0]!r} cannot be run: {error.strerror}"
        if is_of_the_command(error):
            _tell(agent_fd, Refused(reason=Reason.INVALID_PROGRAM, message=message))
        remark(f"muster: {message}")
        sys.exit(NOT_FOUND if missing else NOT_EXECUTABLE)


def _tell(agent_fd: int | None, message: RankMessage) -> None:
    Voice(Line(None if agent_fd is None else os.dup(agent_fd))).say(message)


if __name__ == "__main__":
    sys.exit(main())
