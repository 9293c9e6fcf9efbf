"""API and coordinator as child processes, which are restarted whenever they die."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, Final

from cli.output import say
from muster.contracts.errors import MusterError
from muster.contracts.job.retry import describe_status
from muster.contracts.settings.names import LIFELINE_FD, STANDBY
from muster.contracts.settings.paths import DataDir
from muster.host.limits import ShellLimits
from muster.host.processes import module_command, sigint_blocked

LOG_TAIL_LINES: Final = 5

EARLY_SECONDS: Final = 1.0
"""A service that ran for less is started again after a pause, so that it does not burn a core."""

PAUSE_SECONDS: Final = 0.5

KILL_AFTER_SECONDS: Final = 5.0
"""The API has nothing to save: it is killed this long after SIGTERM."""


@dataclass(slots=True)
class Service:
    """A child process that is started again whenever it dies.

    It has a session of its own, because its owner decides what a Ctrl-C means for it. It ends by
    itself when its owner is killed: see `muster.host.processes`.
    """

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    output: BinaryIO | None = None
    """Where it writes; None: where its owner does."""
    limits: ShellLimits | None = None
    """Those that it starts with, if its owner has changed its own."""
    is_standby: bool = False
    """It loads its modules, and opens nothing until `start`."""
    has_served: bool = False
    """Set by the owner. Before that, an exit code above 0 is final: the settings are wrong."""
    _process: asyncio.subprocess.Process | None = None
    _signal: signal.Signals | None = None
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> int:
        """Keep the service running until `end`; return its last exit code, 0 if never started."""
        code = 0
        reading, writing = os.pipe()
        try:
            while not self._ending.is_set():
                started = time.monotonic()
                code = await self._run_once(reading)
                if self._ending.is_set() or (code > 0 and not self.has_served):
                    break
                say(f"the {self.name} {describe_status(code)}; it is started again")
                if time.monotonic() - started < EARLY_SECONDS:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._ending.wait(), PAUSE_SECONDS)
        finally:
            os.close(reading)
            os.close(writing)
        return code

    def start(self) -> None:
        """Let a stand-by begin."""
        self.is_standby = False
        self._begin()

    def end(self, number: signal.Signals) -> None:
        """End the service for good; may be called again with a stronger signal."""
        self._signal = number
        self._ending.set()
        self._send()

    async def _run_once(self, lifeline: int) -> int:
        is_standby = self.is_standby
        environ = {**self.environ, LIFELINE_FD: str(lifeline)}
        if is_standby:
            environ[STANDBY] = "1"
        with sigint_blocked():
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=asyncio.subprocess.PIPE if is_standby else asyncio.subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
                env=environ,
                umask=-1 if self.limits is None else self.limits.umask,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        if self.limits is not None:
            self.limits.apply_to(self._process.pid)
        if not self.is_standby:
            self._begin()  # `start` was called meanwhile
        self._send()  # `end` may have been called while the process was being created
        return await self._process.wait()

    def _begin(self) -> None:
        if self._process and self._process.stdin:
            self._process.stdin.write(b"\n")

    def _send(self) -> None:
        process, number = self._process, self._signal
        if process is not None and process.returncode is None and number is not None:
            if self.is_standby and process.stdin:
                process.stdin.close()  # SIGINT is still blocked there
            process.send_signal(number)


class ServicePair:
    """API and coordinator of one data directory."""

    def __init__(
        self,
        environ: Mapping[str, str],
        output: BinaryIO | None = None,
        limits: ShellLimits | None = None,
        *,
        is_coordinator_held: bool = False,
        is_standby: bool = False,
    ) -> None:
        """Start both, or the coordinator as a stand-by; needs a running event loop.

        `limits` are those of the coordinator, and so of ranks. See `Service`.
        """
        self._api = Service("api", module_command("api"), environ, output)
        self._coordinator = Service(
            "coordinator", module_command("coordinator"), environ, output, limits
        )
        self._api.is_standby = is_standby
        self._coordinator.is_standby = is_standby or is_coordinator_held
        self.api = asyncio.create_task(self._api.run())
        self.coordinator = asyncio.create_task(self._coordinator.run())

    def start_coordinator(self) -> None:
        """Let it begin, unless it has."""
        self._coordinator.start()

    @property
    def has_begun(self) -> bool:
        """False for a stand-by."""
        return not self._api.is_standby

    def start(self) -> None:
        """Let both begin, which were a stand-by so far."""
        self._api.start()
        self._coordinator.start()

    async def hand_over(self) -> None:
        """End both, while agents and ranks run on."""
        self._coordinator.end(signal.SIGTERM)
        await self.coordinator
        await self.end_api()

    def mark_served(self) -> None:
        """Restart them whenever they end from now on."""
        self._api.has_served = self._coordinator.has_served = True

    async def end_coordinator(self) -> None:
        """Return once every rank has saved and exited."""
        self._coordinator.end(signal.SIGINT)
        await self.coordinator

    async def end_api(self) -> None:
        self._api.end(signal.SIGTERM)
        await asyncio.wait([self.api], timeout=KILL_AFTER_SECONDS)
        self._api.end(signal.SIGKILL)
        await self.api

    def kill(self) -> None:
        self._coordinator.end(signal.SIGKILL)
        self._api.end(signal.SIGKILL)


def failed_start(files: DataDir, offset: int) -> MusterError:
    """Return the error of services that ended at once, whose log begins at `offset`."""
    lines = files.services_log.read_bytes()[offset:].decode(errors="replace").splitlines()
    tail = "\n".join(lines[-LOG_TAIL_LINES:]) or "(empty: is the disk full?)"
    return MusterError(f"the services did not come up; their log is {files.services_log}:\n{tail}")
