"""One rank: ``python -P -m worker`` reads its environment and becomes the program.

A command is *exec*ed, so the process keeps its pid, its channel and its log, and nothing of Muster
stays in memory. Without a command it becomes a rank of managed training.
"""

import os
import signal
import sys
from typing import Final, NoReturn

from muster.contracts.errors import InvalidEnvironment
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import Reason
from muster.contracts.messages.rank import Executing, PermanentFailure, RankMessage
from muster.contracts.settings.environ import RankSettings
from muster.contracts.settings.names import PROCESS_TAG, SINGLE_THREADED
from muster.host.containment import contain_self
from muster.host.processes import module_command
from muster.runtime.agent_client import AgentClient, AgentSocket
from muster.runtime.stderr_messages import print_stderr
from worker.ranks.start import is_command_error

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126


def main() -> int:
    """Become the rank's program; return only if the environment is invalid."""
    try:
        settings = RankSettings.read(os.environ, world_size=JobSpec().world_size)
    except InvalidEnvironment as error:
        print_stderr(f"muster: {error}")
        return 2
    if settings.command is None:
        # Not in this process: a program's own module `worker` must not meet ours.
        argv = module_command("muster.training.rank")
        os.execve(argv[0], argv, {**SINGLE_THREADED, **os.environ})  # noqa: S606
    if PROCESS_TAG in os.environ:  # not when started by hand
        contain_self(os.environ[PROCESS_TAG])
    # When started by hand, the defaults hold for the program too.
    os.environ.setdefault("RANK", str(settings.rank))
    os.environ.setdefault("WORLD_SIZE", str(settings.world_size))
    return _exec(settings.command, settings.agent_fd)


def _exec(command: tuple[str, ...], agent_fd: int | None) -> NoReturn:
    """Replace this process by `command`; report that, and report a failure."""
    if agent_fd is not None:
        os.set_inheritable(agent_fd, True)  # noqa: FBT003  the standard library's signature
    _send(agent_fd, Executing())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, programs expect them
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606  running the user's argv is the purpose
    except OSError as error:
        message = f"the command {command[0]!r} cannot be run: {error.strerror}"
        if is_command_error(error):
            _send(agent_fd, PermanentFailure(reason=Reason.INVALID_PROGRAM, message=message))
        print_stderr(f"muster: {message}")
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


def _send(agent_fd: int | None, message: RankMessage) -> None:
    AgentClient(AgentSocket(None if agent_fd is None else os.dup(agent_fd))).send(message)


if __name__ == "__main__":
    sys.exit(main())
