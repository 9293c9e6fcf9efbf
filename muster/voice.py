"""How a rank is heard: its socket to the agent, and the thread that beats.

Training never waits for supervision. A message is sent whole or, if nobody empties the socket,
not at all; the next beat says everything again. Without an agent there is nobody to tell.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from muster.contracts.messages import Beat, RankMessage, encode

NEWS_SECONDS: Final = 0.2
"""A step is told at once if the last one was told at least this long ago."""

ROOM_PATIENCE_SECONDS: Final = 1.0
"""How long something that will not be said again waits for an agent that is behind."""


class Voice:
    """Sends messages to the agent; any thread may use it."""

    def __init__(self, agent_fd: int | None) -> None:
        self._channel = None if agent_fd is None else _channel(agent_fd)

    def say(self, message: RankMessage) -> None:
        """Send a message; it is lost if there is no agent, or one that does not listen."""
        if self._channel is not None:
            with suppress(OSError):
                self._channel.send(encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def say_patiently(self, message: RankMessage) -> None:
        """Send a message, and wait a moment for room if there is none."""
        if self._channel is not None:
            room = select.poll()
            room.register(self._channel, select.POLLOUT)
            room.poll(1000 * ROOM_PATIENCE_SECONDS)
        self.say(message)


def _channel(agent_fd: int) -> socket.socket | None:
    """Return the channel, or None if a launcher between the agent and us has closed it."""
    try:
        return socket.socket(fileno=agent_fd)
    except OSError:
        return None


class Heart:
    """Beats from its own thread, and from the training thread when there is news."""

    def __init__(self, voice: Voice, state: Callable[[], Beat], heartbeat_seconds: float) -> None:
        self._voice = voice
        self._state = state
        self._heartbeat_seconds = heartbeat_seconds
        self._stopped = threading.Event()
        self._next_news = 0.0

    def start(self) -> None:
        threading.Thread(target=self._beat_forever, name="muster-heart", daemon=True).start()

    def stop(self) -> None:
        """Beat once more, with the last word on where the rank is, and no more."""
        self._stopped.set()
        self._voice.say(self._state())

    def news(self) -> None:
        """Tell the present state, unless it was told a moment ago."""
        now = time.monotonic()
        if now >= self._next_news:
            self._next_news = now + NEWS_SECONDS
            self._voice.say(self._state())

    def _beat_forever(self) -> None:
        while not self._stopped.wait(self._heartbeat_seconds):
            self._voice.say(self._state())
