"""Restarts a service whenever it ends, as systemd or Kubernetes would."""

import threading
import time

import httpx

from tests.support.installation import Installation, Service, await_value

YOUNG_SECONDS = 1.0
PAUSE_SECONDS = 0.2
"""Delay before a service that ended soon after its start is restarted."""


class Restarter:
    """Keeps one service running and records when it ended (Unix time)."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.ends: list[float] = []

    def start(self) -> None:
        """Start the service if necessary, and keep it running."""
        if self._service.process is None:
            self._service.start()
        self._thread.start()

    def end(self) -> None:
        """Stop restarting."""
        self._is_ending.set()

    def _run(self) -> None:
        while (process := self._service.process) is not None:
            started = time.monotonic()
            process.wait()
            if self._is_ending.is_set():
                return
            self.ends.append(time.time())
            if time.monotonic() - started < YOUNG_SECONDS:
                time.sleep(PAUSE_SECONDS)
            self._service.start()


def await_api(installation: Installation) -> None:
    """Wait until the API answers."""

    def answers() -> bool:
        try:
            return installation.request("GET", "/jobs?limit=1").is_success
        except httpx.TransportError:
            return False

    await_value(answers, str)
