"""A rank table with real, small processes that are plain Python instead of a rank's launcher."""

import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from uuid import uuid4

from muster.contracts.messages.agent import AgentMessage, RankSaid, StartRank
from muster.contracts.messages.rank import Hello
from muster.contracts.messages.wire import encode
from muster.contracts.settings.names import PROCESS_TAG
from muster.contracts.settings.paths import JobFiles
from muster.host.containment import set_tag_limit
from tests.support.secret_rank import assignment
from worker.ranks.ranks import RankTable
from worker.ranks.start import RankSecrets

PATIENCE_SECONDS = 10.0
SAY_HELLO = f"import os; os.write(CHANNEL, {encode(Hello())!r}); "
WAIT = "import signal; signal.pause()"

RECONNECT_AND_SEND = """
import socket
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
link.send({said!r})
"""


@dataclass
class Interpreter:
    """Starts a line of Python, with the log as output and `CHANNEL` as the channel's number."""

    words: str = ""

    def start(self, order: StartRank, log: int, channel: socket.socket, *gpus: int) -> int:
        words = f"CHANNEL = {channel.fileno()}; {self.words}"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", words],
            stdout=log,
            stderr=log,
            cwd=Path(order.working_dir),
            env=order.environment,
            pass_fds=(channel.fileno(), *gpus),
            start_new_session=True,
            # As the launcher does; safe with one thread.
            preexec_fn=partial(set_tag_limit, order.environment[PROCESS_TAG]),  # noqa: PLW1509
        )
        process.returncode = 0  # the table reaps it
        return process.pid

    def warm_up(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class TableLoop:
    """A rank table, what it reports, and its loop."""

    root: Path
    uid: str = field(default_factory=lambda: uuid4().hex)
    reports: list[AgentMessage] = field(default_factory=list)
    starter: Interpreter = field(default_factory=Interpreter)

    def __post_init__(self) -> None:
        self.files = JobFiles(self.root)
        self.selector = selectors.DefaultSelector()
        given = assignment(self.root)
        self.ranks = RankTable(
            given, self.selector, self.starter, self.reports.append, RankSecrets(given)
        )

    def start(self, words: str, *, rank: int = 0, attempt: int = 0, **new: str) -> None:
        self.starter.words = words
        order = {
            "rank": rank,
            "attempt": attempt,
            "environment": {PROCESS_TAG: f"{self.uid}/{rank}/{attempt}"},
            "working_dir": "/",
        }
        self.ranks.start(StartRank(**{**order, **new}))

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            for key, _ in self.selector.select(0.02):
                key.data()
            self.ranks.tick()
            if condition():
                return
        raise AssertionError(f"the condition was never met: {self.reports}")

    def run_until_empty(self) -> None:
        self.run_until(lambda: not self.ranks)

    def has_received_hello(self) -> bool:
        return any(isinstance(report, RankSaid) for report in self.reports)

    def close(self) -> None:
        """Close what an agent keeps open until it exits."""
        for listening in list(self.selector.get_map().values()):
            listening.fileobj.close()
        self.selector.close()
