"""Scripts of one household, each a process of this machine or of a test host."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import IO, Any, TypeAlias

from tests.support.hosts import Host
from tests.support.installation import DEADLINE_SECONDS

ROOT = Path(__file__).parents[2]
Option: TypeAlias = bool | float | str | list[str]

COMMAND = [sys.executable, "-m", "tests.support.home_script"]


class HomeScript:
    """One process; `ask` it for something and read the `answer`."""

    def __init__(
        self, host: Host | None, environ: Mapping[str, str], command: Sequence[str] = COMMAND
    ) -> None:
        self._stdin, self._stdout = os.pipe(), os.pipe()
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
        with os.fdopen(self._stdin[0], "rb") as read, os.fdopen(self._stdout[1], "wb") as write:
            if host is None:
                self._process: Any = subprocess.Popen(
                    command, env=env, cwd=ROOT, stdin=read, stdout=write
                )
            else:
                self._process = host.start(command, env, cwd=ROOT, stdin=read, output=write)
        self._lines: IO[bytes] = os.fdopen(self._stdout[0], "rb", 0)
        self.pid: int = self._process.pid

    def ask(self, verb: str, **options: Option) -> None:
        os.write(self._stdin[1], json.dumps([verb, options]).encode() + b"\n")

    def answer(self, timeout_seconds: float = DEADLINE_SECONDS) -> dict[str, Any]:
        assert select([self._lines], [], [], timeout_seconds)[0], "no answer"
        while (said := self._lines.readline()).startswith(b"muster: waits for"):
            pass
        assert said.startswith(b"{"), said.decode() + self._lines.read(10_000).decode()
        return dict(json.loads(said))

    def call(self, verb: str, **options: Option) -> dict[str, Any]:
        self.ask(verb, **options)
        return self.answer()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self.kill()
        self.kill(signal.SIGCONT)
        self._process.wait()
        os.close(self._stdin[1])
        self._lines.close()


class Household:
    """Starts scripts that know one secret."""

    def __init__(self, directory: Path) -> None:
        self.secret = secrets.token_hex()
        self._directory = directory
        self._started: list[HomeScript] = []

    def start(self, host: Host | None = None, **environ: str) -> HomeScript:
        """Start a script; `environ` goes before what the household gives it."""
        name = f"data-{secrets.token_hex(4)}"
        data = (host.local if host else self._directory) / name
        (host.directory / name if host else data).mkdir(mode=0o700)
        given = {"MUSTER_CLUSTER_KEY": self.secret, "MUSTER_DATA_DIR": str(data)}
        script = HomeScript(host, given | environ)
        self._started.append(script)
        return script

    def scripts(self, count: int, *hosts: Host) -> list[HomeScript]:
        """Start so many, each on a host of its own if there are any, and wait until they run."""
        started = [self.start(*hosts[number : number + 1]) for number in range(count)]
        for script in started:
            script.answer()
        return started

    def end(self) -> None:
        for script in self._started:
            script.end()


@contextmanager
def household(directory: Path) -> Iterator[Household]:
    made = Household(directory)
    try:
        yield made
    finally:
        made.end()


def meet(scripts: list[HomeScript], **options: Option) -> list[dict[str, Any]]:
    """Have scripts wait for each other; return what each got."""
    return ask_all(scripts, "discover", peers=len(scripts) - 1, **options)


def ask_all(scripts: list[HomeScript], verb: str, **options: Option) -> list[dict[str, Any]]:
    for script in scripts:
        script.ask(verb, **options)
    return [script.answer() for script in scripts]
