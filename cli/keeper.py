"""Keeps one service running: started again at once whenever it dies.

Without limit, because what dies at three in the morning should be back at three; with a short
pause when it died young, so that a broken one does not burn a core.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from muster.contracts.environ import LIFELINE_FD

YOUNG_SECONDS: Final = 1.0
PAUSE_SECONDS: Final = 0.5


class Keeper:
    """One service, ``python -P -m <module>``, in its own session: Ctrl-C is for us to pass on."""

    def __init__(self, module: str, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._module = module
        self._environ = environ
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._ending = False
        self.has_served = False
        """Set by the owner once the service answered; before that, an error of its own is final."""

    async def run(self) -> int:
        """Keep the service until `end`; return the exit code it ended with.

        Returns early with that code if the service gives up by itself before it ever served:
        then its settings are wrong, and it has said how.
        """
        reading, writing = os.pipe()
        try:
            while True:
                started = time.monotonic()
                code = await self._serve_once(reading)
                if self._ending or (code > 0 and not self.has_served):
                    return code
                self._say(f"the {self._module} {_describe(code)}; it is started again")
                if time.monotonic() - started < YOUNG_SECONDS:
                    await asyncio.sleep(PAUSE_SECONDS)
        finally:
            os.close(reading)
            os.close(writing)

    def end(self, number: signal.Signals) -> None:
        """Send the signal that ends the service for good."""
        self._ending = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _serve_once(self, lifeline: int) -> int:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self._module,
            stdin=asyncio.subprocess.DEVNULL,
            env={**self._environ, LIFELINE_FD: str(lifeline)},
            pass_fds=(lifeline,),
            start_new_session=True,
        )
        return await self._process.wait()


def _describe(code: int) -> str:
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with code {code}"
