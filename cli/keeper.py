"""Keeps one service running: started again at once whenever it dies.

Without limit, because what dies at three in the morning should be back at three; with a short
pause when it died young, so that a broken one does not burn a core.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from muster.contracts.endings import describe_status
from muster.contracts.environ import LIFELINE_FD
from muster.lifeline import interrupt_held
from muster.processes import stands_still

YOUNG_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 0.5

STANDSTILL_SECONDS: Final = 10.0
"""A service that was stopped for so long is ended: who started it again would go on at once."""

LOOK_SECONDS: Final = 1.0


class Keeper:
    """One service in its own session: Ctrl-C is for us to pass on."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        say: Callable[[str], None],
        standstill_seconds: float = STANDSTILL_SECONDS,
    ) -> None:
        self._name = name
        self._command = command
        self._environ = environ
        self._say = say
        self._standstill_seconds = standstill_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._last_word: signal.Signals | None = None
        self._ending = asyncio.Event()
        self.has_served = False
        """Set by the owner once the service answered; before that, an error of its own is final."""

    async def run(self) -> int:
        """Keep the service until `end`; return the exit code it ended with, 0 if it never began.

        Returns early with that code if the service gives up by itself before it ever served:
        then its settings are wrong, and it has said how.
        """
        code = 0
        reading, writing = os.pipe()
        try:
            while not self._ending.is_set():
                started = time.monotonic()
                code = await self._serve_once(reading)
                if self._ending.is_set() or (code > 0 and not self.has_served):
                    break
                self._say(f"the {self._name} {describe_status(code)}; it is started again")
                if time.monotonic() - started < YOUNG_SECONDS:
                    await self._pause()
        finally:
            os.close(reading)
            os.close(writing)
        return code

    def end(self, number: signal.Signals) -> None:
        """End the service for good with this signal, also one that is only about to start.

        May be called again with a stronger one.
        """
        self._last_word = number
        self._ending.set()
        self._pass_on()

    async def _serve_once(self, lifeline: int) -> int:
        with interrupt_held():
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                env={**self._environ, LIFELINE_FD: str(lifeline)},
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        self._pass_on()  # what was said while there was nobody yet to hear it
        watch = asyncio.create_task(self._end_if_it_stands_still(self._process))
        try:
            return await self._process.wait()
        finally:
            watch.cancel()

    async def _end_if_it_stands_still(self, process: asyncio.subprocess.Process) -> None:
        """Nobody else sees to it: to the kernel, a process that is stopped lives."""
        pause = min(LOOK_SECONDS, self._standstill_seconds)
        still_seconds = 0.0
        while still_seconds < self._standstill_seconds:
            await asyncio.sleep(pause)
            still_seconds = still_seconds + pause if stands_still(process.pid) else 0.0
        self._say(f"the {self._name} stood still (SIGSTOP) for {still_seconds:g} s: it is ended")
        process.kill()

    def _pass_on(self) -> None:
        process, number = self._process, self._last_word
        if process is not None and process.returncode is None and number is not None:
            process.send_signal(number)

    async def _pause(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), PAUSE_SECONDS)
